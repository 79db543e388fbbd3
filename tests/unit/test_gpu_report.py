"""``vllm-diffusion doctor --gpu``: a table, an exit status, and a report without names."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.support.kernel_stand_ins import COMMAND
from vllm_diffusion.cli import gpu_report
from vllm_diffusion.cli.main import main
from vllm_diffusion.kernel_choice import limits, process
from vllm_diffusion.startup import machine


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels are stand-ins, and the 26B's shape alone."""
    driver = machine.NvidiaDriver(1, "580.1", (13, 0), None)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: driver)
    monkeypatch.setattr(machine, "nvidia_problem", lambda: None)
    monkeypatch.setattr(gpu_report, "gpu_name", lambda device: "NVIDIA H200 9.0")
    monkeypatch.setattr(process, "COMMAND", COMMAND)
    monkeypatch.setattr(
        gpu_report, "served_models", lambda model: [("a shape", gpu_report.published_26b())]
    )


@pytest.mark.usefixtures("gpu")
def test_all_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.strip().startswith("kernel"))
    assert "largest difference" in head
    (line,) = [
        x for x in lines if "16 heads on 2 of 512, full, denoise, triton" in x and "graph" not in x
    ]
    assert "right" in line
    assert "1.0e-03" in line


@pytest.mark.usefixtures("gpu")
def test_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds the GPU, versions and outcomes, and what would serve instead."""
    monkeypatch.setenv("STAND_INS", json.dumps({"statistics, triton": "wrong"}))
    assert main(["doctor", "--gpu", "--report", str(tmp_path / "report.json")]) == 1
    said = capsys.readouterr().out
    assert "In its place serves reference" in said
    text = (tmp_path / "report.json").read_text()
    report = json.loads(text)
    assert report["facts"]["gpu"] == "NVIDIA H200 9.0"
    assert report["facts"]["driver"] == "580.1"
    (case,) = [each for each in report["cases"]["a shape"] if each["case"] == "statistics, triton"]
    assert case == {
        "case": "statistics, triton",
        "state": "wrong",
        "why": "attention: error 1.2 exceeds 0.01",
    }
    assert str(tmp_path) not in text
    assert socket.gethostname() not in text


def test_without_names() -> None:
    text = f"ptxas /home/alice/.triton/cache/x.ptx on {socket.gethostname()} ~/secret/run 1/2"
    assert gpu_report.without_names(text) == "ptxas x.ptx on this machine run 1/2"


def test_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine, "nvidia_driver", lambda: machine.NvidiaDriver(0, None, None, "none")
    )
    monkeypatch.setattr(machine, "nvidia_problem", lambda: None)
    assert main(["doctor", "--gpu"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "doctor --gpu needs a working NVIDIA GPU: this machine has none."
    )
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--report", "x"])
    assert ended.value.code == 2
    assert "--report is for --gpu" in capsys.readouterr().err


def test_share_of_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an H200's 4.8 TB/s and 989 TFLOP/s, the nearer one."""

    class Properties:
        major, minor, multi_processor_count = 9, 0, 132
        clock_rate, memory_clock_rate, memory_bus_width = 1_830_000, 3_201_000, 6144

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: Properties)
    assert limits.share_of_limits(4_900_000_000, 0, 1e-3) == pytest.approx(0.997, abs=0.01)
    assert limits.share_of_limits(0, 495_000_000_000, 1e-3) == pytest.approx(0.5, abs=0.01)
    Properties.major = 7
    assert limits.share_of_limits(1, 1, 1.0) is None
