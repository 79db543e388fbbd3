"""``vllm-diffusion doctor``, and what it says of the kernels on a GPU."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.kernel_stand_ins import COMMAND
from vllm_diffusion.cli import doctor, gpu_report
from vllm_diffusion.cli.doctor import OK, PROBLEM, WARNING, Fact
from vllm_diffusion.cli.main import main
from vllm_diffusion.kernel_choice import process
from vllm_diffusion.startup import machine

PLUGINS = "vllm_diffusion,vllm_diffusion_cpu"


@pytest.mark.parametrize(
    ("name", "value", "mark"),
    [
        ("VLLM_DIFFUSION_DISABLE", "1", PROBLEM),
        ("VLLM_DIFFUSION_DISABLE", "yes", WARNING),
        ("VLLM_PLUGINS", f"{PLUGINS},vllm_diffusion_metrics", OK),
        ("VLLM_PLUGINS", PLUGINS, WARNING),
        ("VLLM_PLUGINS", "", PROBLEM),
        ("VLLM_TARGET_DEVICE", "cpu", PROBLEM),
    ],
)
def test_environment(name: str, value: str, mark: str, monkeypatch) -> None:
    """Every variable that decides who serves is marked; nothing set is nothing wrong."""
    monkeypatch.setattr(machine, "is_vllm_cpu_build", lambda: False)
    facts = {fact.name: fact for fact in doctor.environment_facts({name: value})}
    assert facts.pop(name).mark == mark
    assert {fact.mark for fact in facts.values()} == {OK}


@pytest.mark.parametrize(("force_cpu", "mark"), [("", PROBLEM), ("1", WARNING)])
def test_old_driver(force_cpu: str, mark: str, monkeypatch) -> None:
    """A GPU that cannot start is a problem unless the CPU was asked for."""
    driver = machine.NvidiaDriver(1, "535.10", (12, 2), None)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: driver)
    monkeypatch.setattr(machine, "nvidia_problem", lambda: "the driver is too old")
    monkeypatch.setenv("VLLM_DIFFUSION_CPU", force_cpu)
    facts = [(fact.mark, fact.value) for fact in doctor.accelerator_facts()]
    assert facts == [(OK, "535.10, CUDA up to 12.2"), (mark, "the driver is too old")]


def test_report(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A remedy stands under its fact; status 1 where something has to be mended, a check that breaks too."""

    def breaks() -> Iterator[Fact]:
        yield Fact("a", "1", "mend it", WARNING)
        raise OSError("gone")

    monkeypatch.setattr(doctor, "SECTIONS", {"Title": breaks})
    monkeypatch.setattr(doctor, "quieten", lambda: None)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[2:4] == ["  warning  a                1", " " * 28 + "-> mend it"]
    assert said[4].startswith("  problem  cannot be found  ")
    assert "gone" in said[4]
    assert said[-1].startswith("This machine cannot serve yet: 1 to mend")


@pytest.mark.engine
def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that can serve: what would; a model class that is not ours is a problem."""
    monkeypatch.setenv("VLLM_DIFFUSION_CPU", "1")
    for name in ("VLLM_PLUGINS", "VLLM_DIFFUSION_DISABLE", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    status = main(["doctor"])
    said = capsys.readouterr().out
    assert status == 0, said
    for name in (
        "cpu.platform.DiffusionCpuPlatform",
        "families.diffusion_gemma.model.DiffusionGemmaForBlockDiffusion",
        "attention.backend.CanvasAttentionBackend",
    ):
        assert f"vllm_diffusion.{name}" in said
    assert "every plugin but endpoints is loaded" in said
    assert "This machine can serve" in said

    from vllm.model_executor.models import ModelRegistry

    stock = SimpleNamespace(module_name="vllm.a", class_name="Stock")
    monkeypatch.setitem(ModelRegistry.models, "Shipped", stock)
    assert doctor.model_fact("Shipped").mark == PROBLEM


def test_gpu(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each kernel; the report holds the GPU, versions and outcomes, and no names of this machine."""
    driver = machine.NvidiaDriver(1, "580.1", (13, 0), None)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: driver)
    monkeypatch.setattr(machine, "nvidia_problem", lambda: None)
    monkeypatch.setattr(gpu_report, "gpu_name", lambda device: "NVIDIA H200 9.0")
    monkeypatch.setattr(process, "COMMAND", COMMAND)
    shapes = [("a shape", gpu_report.published_26b())]
    monkeypatch.setattr(gpu_report, "served_models", lambda model: shapes)
    assert main(["doctor", "--gpu"]) == 0
    assert "16 heads on 2 of 512, full, triton" in capsys.readouterr().out
    monkeypatch.setenv("STAND_INS", json.dumps({"statistics, triton": "wrong"}))
    assert main(["doctor", "--gpu", "--report", str(tmp_path / "report.json")]) == 1
    assert "In its place serves reference" in capsys.readouterr().out
    text = (tmp_path / "report.json").read_text()
    assert socket.gethostname() not in text
    report = json.loads(text)
    assert (report["facts"]["gpu"], report["facts"]["driver"]) == ("NVIDIA H200 9.0", "580.1")
    outcomes = {case["case"]: case["state"] for case in report["cases"]["a shape"]}
    assert outcomes["statistics, triton"] == "wrong"
    names = f"ptxas /home/alice/.triton/cache/x.ptx on {socket.gethostname()} ~/secret/run 1/2"
    assert gpu_report.without_names(names) == "ptxas x.ptx on this machine run 1/2"


@pytest.mark.parametrize(
    ("variables", "is_problem"), [({}, True), ({"XDG_CACHE_HOME": "."}, False)]
)
def test_cache_of_a_user_without_a_home(
    variables: dict[str, str], is_problem: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would make a folder named ~ where it was started; the remedy names the variable to set."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    fact = doctor.cache_fact("vLLM's cache", "VLLM_CACHE_ROOT", "vllm")
    assert (fact.mark == PROBLEM, "VLLM_CACHE_ROOT" in fact.remedy) == (is_problem, is_problem)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert doctor.cache_fact("vLLM's cache", "VLLM_CACHE_ROOT", "vllm").mark != PROBLEM
