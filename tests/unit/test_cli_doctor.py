"""``vllm-diffusion doctor``, and what it says of the kernels on a GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from tests.support.kernel_stand_ins import COMMAND
from vllm_diffusion.cli import doctor as command
from vllm_diffusion.cli import gpu_report
from vllm_diffusion.cli.console import one_line, table
from vllm_diffusion.cli.doctor import Fact, Mark, lines, safely
from vllm_diffusion.cli.gpu_report import faster_option
from vllm_diffusion.cli.main import main
from vllm_diffusion.kernel_choice import process
from vllm_diffusion.kernel_choice.cases import KernelCase
from vllm_diffusion.kernel_choice.process import Outcome
from vllm_diffusion.startup import machine
from vllm_diffusion.startup import machine as detection


def test_lines() -> None:
    """Columns are aligned; a remedy stands under its fact."""
    facts = [Fact("a", "1"), Fact("long name", "2", Mark.PROBLEM, "mend it")]
    assert lines(facts).splitlines() == [
        "  ok       a          1",
        "  problem  long name  2",
        "                      -> mend it",
    ]
    assert lines(facts[:1]) == "  ok       a  1"


def fact_of(environ: dict[str, str], name: str) -> Fact:
    (fact,) = [fact for fact in command.environment_facts(environ) if fact.name == name]
    return fact


@pytest.mark.parametrize(
    ("name", "value", "mark"),
    [
        ("VLLM_DIFFUSION_DISABLE", "1", Mark.PROBLEM),
        ("VLLM_DIFFUSION_DISABLE", "yes", Mark.WARNING),
        ("VLLM_DIFFUSION_DISABLE", "0", Mark.OK),
        ("VLLM_DIFFUSION_CPU", "1", Mark.OK),
        ("VLLM_DIFFUSION_CPU", "true", Mark.WARNING),
        ("VLLM_PLUGINS", "vllm_diffusion,vllm_diffusion_cpu,vllm_diffusion_metrics", Mark.OK),
        ("VLLM_PLUGINS", "vllm_diffusion,vllm_diffusion_cpu", Mark.WARNING),
        ("VLLM_PLUGINS", "vllm_diffusion_cpu", Mark.PROBLEM),
        ("VLLM_PLUGINS", "", Mark.PROBLEM),
        ("VLLM_TARGET_DEVICE", "cpu", Mark.PROBLEM),
        ("VLLM_TARGET_DEVICE", "cuda", Mark.OK),
    ],
)
def test_environment(name: str, value: str, mark: Mark, monkeypatch) -> None:
    """Every variable that decides who serves is marked, and what is marked can be mended."""
    monkeypatch.setattr(detection, "is_vllm_cpu_build", lambda: False)
    fact = fact_of({name: value}, name)
    assert fact.mark is mark
    assert bool(fact.remedy) == (mark is not Mark.OK)


def test_environment_unset() -> None:
    """Nothing set is nothing wrong."""
    assert all(fact.mark is Mark.OK for fact in command.environment_facts({}))


@pytest.mark.parametrize(
    ("requirement", "mark"),
    [("pytest>=1", Mark.OK), ("pytest<1", Mark.WARNING), ("no-such-thing>=1", Mark.PROBLEM)],
)
def test_package(requirement: str, mark: Mark) -> None:
    """A version out of range is a warning, a missing package a problem; both name the command."""
    parsed = Requirement(requirement)
    fact = command.package_fact(parsed.name, parsed)
    assert fact.mark is mark
    assert (requirement in fact.remedy) == (mark is not Mark.OK)


@pytest.mark.parametrize(
    ("system", "machine", "mark"),
    [
        ("linux", "x86_64", Mark.OK),
        ("linux", "aarch64", Mark.WARNING),
        ("darwin", "arm64", Mark.PROBLEM),
        ("win32", "AMD64", Mark.PROBLEM),
    ],
)
def test_system(system: str, machine: str, mark: Mark) -> None:
    """Systems without wheels of vLLM are told what to use."""
    assert command.system_fact(system, machine).mark is mark


DRIVER = detection.NvidiaDriver(1, "535.10", (12, 2), None)
NO_DRIVER = detection.NvidiaDriver(0, None, None, "no library")


@pytest.mark.parametrize(
    ("driver", "problem", "found", "force_cpu", "mark", "said"),
    [
        (NO_DRIVER, None, None, "", Mark.OK, "none; the CPU serves"),
        (DRIVER, None, "cuda", "", Mark.OK, "cuda, 1 device"),
        (DRIVER, "the driver is too old", None, "", Mark.PROBLEM, "too old"),
        (DRIVER, "the driver is too old", None, "1", Mark.WARNING, "too old"),
    ],
)
def test_accelerator(driver, problem, found, force_cpu, mark, said, monkeypatch) -> None:
    """A GPU that cannot start is a problem unless the CPU was asked for."""
    monkeypatch.setattr(detection, "nvidia_driver", lambda: driver)
    monkeypatch.setattr(detection, "nvidia_problem", lambda: problem)
    monkeypatch.setattr(detection, "working_accelerator", lambda: found)
    monkeypatch.setenv("VLLM_DIFFUSION_CPU", force_cpu)
    facts = [*command.accelerator_facts()]
    assert facts[-1].mark is mark
    assert said in facts[-1].value
    if driver is DRIVER:
        assert facts[0].value == "535.10, CUDA up to 12.2"


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not there yet is judged by the one that it will be made in."""
    fact = command.disk_fact("cache", tmp_path / "not" / "yet")
    assert fact.mark is Mark.OK
    monkeypatch.setattr(command, "_NEEDED_CACHE", 2**62)
    assert command.disk_fact("cache", tmp_path).mark is Mark.WARNING
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert command.disk_fact("cache", tmp_path).mark is Mark.PROBLEM


def test_one_line() -> None:
    """The message of an error, also of pydantic's, on one line."""

    class WrappedError(Exception):
        def errors(self) -> list[dict[str, str]]:
            return [{"msg": "Value error, too\n small"}, {"msg": "Value error, too\nlarge"}]

    assert one_line(WrappedError("frame")) == "too small; too large"
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"


def test_table() -> None:
    """Cells are printed as they are, however long: no markup, no emoji, no line that is cut or wrapped."""
    rows = [["[bold]a", "1"], ["b" * 300, ":smile: 22", "x"], ["c"]]
    assert table(rows, indent="  ", figures=True).splitlines() == [
        f"  {'[bold]a':<300}           1",
        f"  {'b' * 300}  :smile: 22  x",
        "  c",
    ]
    assert table([]) == ""


def test_safely() -> None:
    """A check that breaks is a problem in the report, not the end of it."""

    def disk_facts() -> Iterator[Fact]:
        yield Fact("a", "1")
        raise OSError("gone")

    assert safely(disk_facts) == [Fact("a", "1"), Fact("disk", "gone", Mark.PROBLEM)]


UNWANTED = ("VLLM_PLUGINS", "VLLM_DIFFUSION_DISABLE", "VLLM_TARGET_DEVICE")


def doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    return subprocess.run(
        [sys.executable, "-m", "vllm_diffusion.cli.main", "doctor"],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.engine
def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that can serve: what would, and exit status 0."""
    monkeypatch.setenv("VLLM_DIFFUSION_CPU", "1")
    for name in UNWANTED:
        monkeypatch.delenv(name, raising=False)
    status = main(["doctor"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "vllm_diffusion.cpu.platform.DiffusionCpuPlatform" in said
    assert "vllm_diffusion.families.diffusion_gemma.model.DiffusionGemmaForBlockDiffusion" in said
    assert "vllm_diffusion.attention.backend.CanvasAttentionBackend" in said
    assert "This machine can serve" in said


@pytest.mark.engine
def test_stock_model_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model class that is not ours is a problem, whose remedy names the variables."""
    from vllm.model_executor.models import ModelRegistry

    stock = SimpleNamespace(module_name="vllm.a", class_name="Stock")
    monkeypatch.setitem(ModelRegistry.models, "Shipped", stock)
    fact = command.model_fact("Shipped")
    assert (fact.mark, fact.value) == (Mark.PROBLEM, "vllm.a.Stock: stock vLLM's")
    assert "VLLM_PLUGINS" in fact.remedy


@pytest.mark.parametrize("mark", Mark)
def test_exit_status(
    mark: Mark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 where something has to be mended, and 0 beside a warning."""
    sections = {"Title": lambda: iter([Fact("a", "1", mark, "mend")])}
    monkeypatch.setattr(command, "SECTIONS", sections)
    monkeypatch.setattr(command, "quieten", lambda: None)
    assert main(["doctor"]) == (mark is Mark.PROBLEM)
    assert ("cannot serve" in capsys.readouterr().out) == (mark is Mark.PROBLEM)


@pytest.mark.slow
@pytest.mark.engine
def test_doctor_problem() -> None:
    """With the plugin shut out: exit status 1, and how to mend it."""
    report = doctor(VLLM_PLUGINS="vllm_diffusion_cpu", VLLM_DIFFUSION_CPU="1")
    assert report.returncode == 1, report.stdout + report.stderr
    assert "problem  model class" in report.stdout
    assert "or unset it" in report.stdout


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
    (line,) = [x for x in lines if "16 heads on 2 of 512, full, triton" in x]
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


def measured(**microseconds: float) -> list[tuple[KernelCase, Outcome]]:
    """Times of attention in two kinds of layers, by implementation."""
    return [
        (KernelCase("attention", kind, impl), Outcome("right", microseconds=time))
        for kind in ("a", "b")
        for impl, time in microseconds.items()
    ]


def test_the_option_that_is_faster() -> None:
    """Named where it is right in all layers, and faster by enough."""
    assert faster_option(measured(triton=100.0, cute=80.0)) == (
        "Attention takes 20% less time with "
        """--additional-config '{"diffusion": {"attention": "cute"}}'"""
    )
    assert not faster_option(measured(triton=100.0, cute=96.0, reference=900.0))
    assert not faster_option(measured(triton=100.0, cute=80.0)[:-1])
    assert not faster_option([])


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
