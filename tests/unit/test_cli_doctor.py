"""Tests of ``vllm-diffusion doctor``, and of its report of the kernels on a GPU."""

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_diffusion.cli import doctor, gpu_answers, gpu_report
from vllm_diffusion.cli.doctor import OK, PROBLEM, WARNING, Fact
from vllm_diffusion.cli.gpu_answers import Answered, compare, recorded
from vllm_diffusion.cli.kernel_checks import Outcome
from vllm_diffusion.cli.main import main
from vllm_diffusion.startup import gpu_record, machine

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
    """Each variable that decides who serves is marked, and unset ones are right."""
    monkeypatch.setattr(machine, "is_vllm_cpu_build", lambda: False)
    facts = {fact.name: fact for fact in doctor.environment_facts({name: value})}
    assert facts.pop(name).mark == mark
    assert {fact.mark for fact in facts.values()} == {OK}


@pytest.mark.parametrize(("force_cpu", "mark"), [("", PROBLEM), ("1", WARNING)])
def test_old_driver(force_cpu: str, mark: str, monkeypatch) -> None:
    """A GPU that cannot start is a problem unless the user chose the CPU."""
    driver = machine.NvidiaDriver(1, "535.10", (12, 2), None)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: driver)
    monkeypatch.setattr(machine, "nvidia_problem", lambda: "the driver is too old")
    monkeypatch.setenv("VLLM_DIFFUSION_CPU", force_cpu)
    facts = [(fact.mark, fact.value) for fact in doctor.accelerator_facts()]
    assert facts == [(OK, "535.10, CUDA up to 12.2"), (mark, "the driver is too old")]


def test_report(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A remedy is printed below its fact, and a problem or a broken check gives status 1."""

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
    """A machine that can serve is reported with its classes; another model class is a problem."""
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

    stock = SimpleNamespace(load_model_cls=lambda: type(ModelRegistry))
    monkeypatch.setitem(ModelRegistry.models, "Shipped", stock)
    assert doctor.model_fact("Shipped").mark == PROBLEM


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Simulate a GPU whose kernels and server are right, except those that a test names."""
    driver = machine.NvidiaDriver(1, "580.1", (13, 0), None)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: driver)
    monkeypatch.setattr(machine, "nvidia_problem", lambda: None)
    for module in (gpu_report, gpu_record):
        monkeypatch.setattr(module, "gpu_name", lambda device: "NVIDIA H200 9.0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    wrong: dict[str, str] = {}

    def outcomes(cases: Iterator[Any], device: str) -> Iterator[Any]:
        for case in cases:
            why = next((why for part, why in wrong.items() if part in case.name), "")
            state: Any = "unknown" if "memory" in why else "wrong"
            yield case, Outcome(state, why) if why else Outcome("right", "", 1e-3, 8.0)

    monkeypatch.setattr(gpu_report, "outcomes", outcomes)
    shapes = [("a shape", gpu_report.published_26b())]
    monkeypatch.setattr(gpu_report, "served_models", lambda model: shapes)
    monkeypatch.setattr(gpu_report, "problems_of_answers", list)
    return wrong


def test_gpu(gpu, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The report has a row for each kernel, the GPU and versions, and no name of the machine."""
    assert main(["doctor", "--gpu"]) == 0
    assert "16 heads on 2 of 512, full, triton" in capsys.readouterr().out
    gpu |= {"statistics, triton": "error 1.2 exceeds 0.01", "of 512, full, triton": "off"}
    assert main(["doctor", "--gpu", "--report", str(tmp_path / "report.json")]) == 1
    said = capsys.readouterr().out
    assert "statistics, triton is wrong on this GPU (error 1.2 exceeds 0.01)" in said
    assert """right with --additional-config '{"diffusion": {"attention": "cute"}}'""" in said
    text = (tmp_path / "report.json").read_text()
    assert socket.gethostname() not in text
    report = json.loads(text)
    assert (report["facts"]["gpu"], report["facts"]["driver"]) == ("NVIDIA H200 9.0", "580.1")
    outcomes = {case["case"]: case["state"] for case in report["cases"]["a shape"]}
    assert outcomes["statistics, triton"] == "wrong"
    names = f"ptxas /home/alice/.triton/cache/x.ptx on {socket.gethostname()} ~/secret/run 1/2"
    assert gpu_report.without_names(names) == "ptxas x.ptx on this machine run 1/2"


@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        # No server runs it: it is in the table, and not a problem.
        ({"statistics, reference": "off"}, 0, "statistics, reference: off"),
        ({"noise": "out of memory"}, 1, "noise, PyTorch could not be checked on this GPU"),
        ({"device": "off"}, 1, "computes wrongly without any kernel of this package (off)"),
    ],
)
def test_wrong_kernels(
    wrong: dict[str, str],
    status: int,
    words: str,
    gpu,
    monkeypatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A kernel that serves must be right, or nothing is recorded; if PyTorch itself is wrong, no
    other kernel is checked and no server gets a question.
    """
    gpu |= wrong
    if "device" in wrong:
        monkeypatch.setattr(gpu_report, "problems_of_answers", lambda: pytest.fail("asked"))
    assert main(["doctor", "--gpu"]) == status
    said = capsys.readouterr().out
    assert words in said
    assert ("noise" in said) == ("device" not in wrong)
    record = gpu_record.record_path(gpu_record.facts_of("NVIDIA H200 9.0"))
    assert record.exists() == (status == 0)


def test_record(gpu, monkeypatch: pytest.MonkeyPatch, vllm_log: pytest.LogCaptureFixture) -> None:
    """A start names the command unless its last run found everything right."""

    def lines() -> list[str]:
        # The command before it leaves warnings off.
        logging.disable(logging.NOTSET)
        vllm_log.clear()
        gpu_record.log_unrecorded(0)
        return vllm_log.messages

    (line,) = lines()
    assert line.endswith("vllm-diffusion doctor --gpu")
    assert "NVIDIA H200 9.0" in line
    assert main(["doctor", "--gpu"]) == 0
    assert lines() == []
    record = gpu_record.record_path(gpu_record.facts_of("NVIDIA H200 9.0"))
    facts = json.loads(record.read_text())
    assert facts.keys() == {"gpu", "driver", "torch", "triton", "vllm", "vllm-diffusion"}
    monkeypatch.setattr(gpu_report, "problems_of_answers", lambda: ["3 of 60 answers differ"])
    assert main(["doctor", "--gpu"]) == 1
    assert len(lines()) == 1


def test_recorded_answers() -> None:
    """Of 60 recorded questions, ten per task, every fifth is sent alone and the others together."""
    questions = recorded()
    assert len(questions) == 60
    batches: list[int] = []

    def ask(batch: Any) -> list[str]:
        batches.append(len(batch))
        return [each.answer for each in batch]

    assert compare(questions, ask) == Answered("", ())
    assert batches == [1] * 12 + [48]

    def ask_wrongly(batch: Any) -> list[str]:
        return ["?" if len(batch) > 1 else each.answer for each in batch]

    found = compare(questions, ask_wrongly)
    assert found.problem == "48 of 60 answers differ from a CPU's"
    assert "'?', and not" in found.different[0]


@pytest.mark.parametrize(
    ("avoids", "last"),
    [
        ("NONE", """Right with --compilation-config '{"cudagraph_mode": "NONE"}'"""),
        ("--enforce-eager", "Right with --enforce-eager"),
        ("nothing", "No option that was tried avoids it; do not serve on this GPU, and report it"),
    ],
)
def test_the_option_that_avoids_a_fault(avoids: str, last: str) -> None:
    """The report names the fault, and after it the first option that gives right answers."""

    def serve(options: Any) -> Answered:
        is_right = any(avoids in each for each in options)
        return Answered("") if is_right else Answered("9 of 60 answers differ", ("a", "b"))

    found = list(gpu_answers.problems(serve))
    assert found == ["9 of 60 answers differ", "a", "b", last]


@pytest.mark.parametrize(
    ("variables", "is_problem"), [({}, True), ({"XDG_CACHE_HOME": "."}, False)]
)
def test_cache_of_a_user_without_a_home(
    variables: dict[str, str], is_problem: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a user without a home, the remedy names the variable of the cache folder."""
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


def test_what_a_server_must_not_hold() -> None:
    """Requests and pages that are left behind the last answer are named, and nothing else is."""
    metrics = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 3.0
"""
    samples = [
        each for family in text_string_to_metric_families(metrics) for each in family.samples
    ]
    assert gpu_answers.held(samples) == {"vllm:kv_cache_usage_perc": 0.25}
    idle = [each._replace(value=0.0) for each in samples]
    assert gpu_answers.held(idle) == {}
