"""The self-check with stand-in kernels that are wrong, raise, end their process, hang.

pytest -s tests/unit/kernel_choice/test_self_check.py -k log    # prints the log lines of each
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from tests.support.kernel_stand_ins import COMMAND
from vllm_diffusion.cli import gpu_report
from vllm_diffusion.kernel_choice import on_ranks, process, record
from vllm_diffusion.kernel_choice.cases import Served
from vllm_diffusion.kernel_choice.self_check import NothingRightError, checked_choices
from vllm_diffusion.kernel_choice.step_shape import StepShape
from vllm_diffusion.startup.kernel_choices import KernelChoices, LayerKind

FULL = LayerKind(16, 2, 512, -1, "auto")
SLIDING = LayerKind(16, 8, 256, 1023, "auto")
GPU = "NVIDIA H200 9.0"
# Device, noise, cache writes, two kinds of layers in two phases, statistics, kept rows, and the graphs.
NUM_CASES = 2 + 1 + 4 + 2 + 1 + 2


def served(**choices: object) -> Served:
    step = StepShape(kernels=KernelChoices(**choices))
    return Served((SLIDING, FULL), step, max_model_len=32768)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Cases run in the stand-in; the file with the name of each that ran."""
    monkeypatch.setattr(process, "COMMAND", COMMAND)
    monkeypatch.setattr(process, "CASE_SECONDS", 2.0)
    monkeypatch.setenv("STAND_INS_LOG", str(tmp_path / "ran"))
    monkeypatch.setenv("STAND_INS_ONCE", str(tmp_path / "once"))
    (tmp_path / "ran").touch()
    return tmp_path / "ran"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What a server would log, as it comes."""
    logger, handler, found = (
        logging.getLogger("vllm.vllm_diffusion"),
        logging.Handler(),
        list[str](),
    )
    handler.emit = lambda each: found.append(f"{each.levelname} {each.getMessage()}")
    logger.addHandler(handler)
    with mock.patch.object(logger, "level", logging.INFO):
        yield found
    logger.removeHandler(handler)


def check(
    folder: Path, fates: dict[str, str] | None = None, *, forgets: bool = False, **choices: object
) -> KernelChoices:
    with mock.patch.dict(os.environ, STAND_INS=json.dumps(fates or {})):
        return checked_choices(
            served(**choices), device="cuda:0", gpu=GPU, folder=folder, forgets=forgets
        )


TRITON_512 = "of 512, full, denoise, triton"
# How Triton's kernel of one kind and phase fails -> part of the warning's reason.
FATES = {
    "wrong": "error 1.2 exceeds 0.01",
    "raises": "CompilationError",
    "crashes": "crashed (SIGSEGV)",
    "exits": "status 3 (ptxas: not found)",
    "hangs": "did not end in 2 s",
}


def test_all_right(tmp_path: Path, lines: list[str], stand_ins: Path) -> None:
    """Nothing changes, and the next start asks nobody."""
    assert check(tmp_path) == KernelChoices()
    assert len(stand_ins.read_text().splitlines()) == NUM_CASES
    assert check(tmp_path) == KernelChoices()
    assert len(stand_ins.read_text().splitlines()) == NUM_CASES
    assert len(lines) == 2
    assert f"{NUM_CASES} right, 0 wrong ({NUM_CASES} checked in" in lines[0]
    assert "all remembered" in lines[1]
    check(tmp_path, forgets=True)
    assert len(stand_ins.read_text().splitlines()) == 2 * NUM_CASES


@pytest.mark.parametrize("fate", FATES)
def test_log_of_a_kernel_that(fate: str, tmp_path: Path, lines: list[str]) -> None:
    """It is replaced where it fails and nowhere else, with one warning, and the rest is still checked."""
    chosen = check(tmp_path, {TRITON_512: fate})
    print(f"\n{fate}:", *lines, sep="\n  ")
    # FlashAttention-4 is the next one, and right here.
    assert chosen.attention == {FULL.name: {"denoise": "cute"}}
    assert chosen == KernelChoices(attention=chosen.attention)
    (warning,) = [line for line in lines if line.startswith("WARNING")]
    assert FATES[fate] in warning
    assert "In its place serves cute" in warning
    assert "doctor --gpu --report FILE" in warning
    # The same without a process, from what is remembered.
    assert check(tmp_path, {"start": "no process may start"}) == chosen


def test_log_of_a_right_kernel(tmp_path: Path, lines: list[str]) -> None:
    check(tmp_path)
    print("\nright:", *lines, sep="\n  ")
    assert not [line for line in lines if line.startswith("WARNING")]


def test_what_an_implementation_refuses(tmp_path: Path, lines: list[str]) -> None:
    """It is no fault, and is passed over without a warning."""
    chosen = check(tmp_path, {"512, full, denoise, cute": "refuses"}, default_attention="cute")
    assert chosen.attention == {FULL.name: {"denoise": "triton"}}
    assert not [line for line in lines if line.startswith("WARNING")]


def test_the_reference_is_last(tmp_path: Path, lines: list[str]) -> None:
    """It takes attention out of the graphs, so no graph of attention is checked."""
    chosen = check(tmp_path, {"denoise, triton": "wrong", "denoise, cute": "raises"})
    assert chosen.attention_of(FULL, "denoise") == "reference"
    assert chosen.attention_of(FULL, "mixed") == "auto"
    assert not chosen.captures_attention("denoise")
    assert chosen.captures_attention("mixed")
    assert "takes many times as long" in "".join(lines)


def test_statistics_and_kept_rows(tmp_path: Path) -> None:
    chosen = check(
        tmp_path,
        {"statistics, triton": "wrong", "kept rows, triton": "crashes"},
        skip_unlikely=True,
    )
    assert (chosen.statistics, chosen.kept_rows) == ("reference", "reference")
    # The reference would wait for the device.
    assert not chosen.skip_unlikely


def test_cache_writes(tmp_path: Path, lines: list[str]) -> None:
    """The other of vLLM's kernels, or PyTorch, which no graph can hold."""
    fates = {"cache writes, triton": "raises"}
    assert check(tmp_path / "one", fates) == KernelChoices(cache_writes="compiled")
    chosen = check(tmp_path / "both", fates | {"cache writes, compiled": "hangs"})
    assert chosen == KernelChoices(cache_writes="reference")
    assert "attention leaves the CUDA graphs. Please" in lines[-2]


def test_graphs(tmp_path: Path, lines: list[str]) -> None:
    chosen = check(tmp_path, {"step graph": "wrong", "attention graph of 16 heads on 2": "wrong"})
    assert chosen == KernelChoices(step_graphs=False, attention_graphs=False)
    assert len([line for line in lines if "the call without a graph" in line]) == 2


@pytest.mark.parametrize("kernel", ["device", "noise", "512, full, mixed"])
def test_nothing_right(kernel: str, tmp_path: Path) -> None:
    """The server does not start, and says so in one line."""
    with pytest.raises(NothingRightError, match="so nothing is served") as raised:
        check(tmp_path, {kernel: "wrong"})
    message = str(raised.value)
    assert "\n" not in message
    assert '"self_check": "off"' in message
    subject = "This GPU computes wrongly" if kernel == "device" else "No implementation of"
    assert message.startswith(subject)
    assert "of device" not in message


@pytest.mark.parametrize("kernel", ["device", "noise", "512, full, mixed"])
def test_nothing_right_is_not_remembered(kernel: str, tmp_path: Path, lines: list[str]) -> None:
    """The next start checks it again, also where an earlier version has remembered it."""
    with pytest.raises(NothingRightError):
        check(tmp_path, {kernel: "wrong"})
    (path,) = tmp_path.rglob("self-check-*.json") if kernel != "device" else (None,)
    assert path is None or all(
        case["state"] == "right" for case in json.loads(path.read_text())["cases"].values()
    )
    assert check(tmp_path) == KernelChoices()
    (path,) = tmp_path.rglob("self-check-*.json")
    content = json.loads(path.read_text())
    content["cases"] |= {
        key: {**case, "state": "wrong", "why": "it was"}
        for key, case in content["cases"].items()
        if key.startswith(kernel)
    }
    path.write_text(json.dumps(content))
    assert check(tmp_path) == KernelChoices()
    assert '"wrong"' not in path.read_text()


def test_doctor_stops_at_a_wrong_gpu(stand_ins: Path) -> None:
    """All other checks compare with PyTorch on the GPU."""
    found: list[Any] = []
    with (
        mock.patch.dict(os.environ, STAND_INS=json.dumps({"device": "wrong"})),
        process.CheckProcess("cuda:0", seconds=30.0) as checker,
    ):
        (line,) = gpu_report.check_all(served(), checker, found)
    assert line.startswith("This GPU computes wrongly")
    assert [case.kernel for case, _ in found] == ["device"]


def test_name_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is readable in logs and in the record's file name."""
    monkeypatch.setattr(current_platform, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(
        current_platform, "get_device_capability", lambda *_: DeviceCapability(9, 0)
    )
    name = on_ranks.gpu_name(0)
    assert name == "NVIDIA H100 80GB HBM3 (compute capability 9.0)"
    path = record.Record(Path("cache"), {"gpu": name}).path
    assert path.name == "self-check-NVIDIA-H100-80GB-HBM3-compute-capability-9-0.json"


@pytest.mark.parametrize("fate", ["out of memory", "is killed"])
def test_nothing_is_known(fate: str, tmp_path: Path, lines: list[str], stand_ins: Path) -> None:
    """What is no fault of the kernel leaves it where it is, and is not remembered."""
    assert check(tmp_path, {TRITON_512: fate}) == KernelChoices()
    assert "nothing is known of 1 kernels" in "".join(lines)
    assert stand_ins.read_text().count(TRITON_512) == 2, "it was not tried again alone"
    check(tmp_path)
    assert stand_ins.read_text().count(TRITON_512) == 3, "it was remembered"


@pytest.mark.parametrize("fate", ["imports first", "is killed once"])
def test_no_fault(fate: str, tmp_path: Path, lines: list[str]) -> None:
    """Imports may take longer than a kernel may, and a process may be killed for another's sake."""
    assert check(tmp_path, {TRITON_512: fate}) == KernelChoices()
    assert not [line for line in lines if line.startswith("WARNING")]


def test_no_process_can_use_the_gpu(tmp_path: Path, lines: list[str]) -> None:
    """As in exclusive-process mode: one line, and the kernels serve."""
    busy = "CUDA-capable device(s) is/are busy or unavailable"
    assert check(tmp_path, {"start": busy}) == KernelChoices()
    (line,) = lines
    assert "skipped" in line
    assert busy in line


def test_no_time_is_left(tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that hangs at its end takes no longer than all may take; the next start goes on."""
    monkeypatch.setattr("vllm_diffusion.kernel_choice.self_check.SECONDS", 1.0)
    began = time.monotonic()
    assert check(tmp_path, {TRITON_512: "hangs"}) == KernelChoices()
    assert time.monotonic() - began < 10
    assert "no time was left" in "".join(lines)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "damaged"),
        ('{"facts": 3, "cases": {}}', "damaged"),
        ('{"facts": {}, "cases": {"a": {"state": "splendid"}}}', "damaged"),
        ('{"facts": {}, "cases": {}}', "of another"),
    ],
)
def test_a_record_that_does_not_hold(
    content: str, said: str, tmp_path: Path, lines: list[str], stand_ins: Path
) -> None:
    """One line, the kernels are checked, and the record is written anew."""
    path = record.Record(tmp_path, record.facts_of(GPU)).path
    path.parent.mkdir()
    path.write_text(content)
    check(tmp_path)
    assert len(stand_ins.read_text().splitlines()) == NUM_CASES
    (line,) = [line for line in lines if line.startswith("WARNING")]
    assert said in line
    check(tmp_path)
    assert len(stand_ins.read_text().splitlines()) == NUM_CASES


def test_a_changed_driver_makes_it_stale(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path)
    facts = record.facts_of(GPU) | {"driver": "600.1"}
    monkeypatch.setattr("vllm_diffusion.kernel_choice.self_check.facts_of", lambda gpu: facts)
    check(tmp_path)
    assert "is of another driver" in "".join(lines)


def test_a_folder_that_cannot_be_written(tmp_path: Path, lines: list[str], stand_ins: Path) -> None:
    """The kernels are checked at every start; one line names the folder and the remedy."""
    (tmp_path / "cache").write_text("a file where a folder should be")
    for _ in range(2):
        check(tmp_path / "cache")
    assert len(stand_ins.read_text().splitlines()) == 2 * NUM_CASES
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 2
    assert "set VLLM_CACHE_ROOT to a folder that can be" in warnings[0]


def test_two_servers_that_start_at_once(tmp_path: Path, stand_ins: Path) -> None:
    """The second waits for the first, and takes what it found."""
    with mock.patch.dict(os.environ, STAND_INS=json.dumps({TRITON_512: "wrong"})):
        chosen: list[KernelChoices] = []

        def start() -> None:
            options = {"device": "cuda:0", "gpu": GPU, "folder": tmp_path, "forgets": False}
            chosen.append(checked_choices(served(), **options))

        servers = [threading.Thread(target=start) for _ in range(2)]
        for server in servers:
            server.start()
        for server in servers:
            server.join()
    assert chosen[0] == chosen[1]
    ran = stand_ins.read_text().splitlines()
    assert len(ran) == len(set(ran)), "a kernel was checked twice"
