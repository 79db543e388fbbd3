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
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests.support.kernel_stand_ins import COMMAND
from vllm_diffusion.kernel_choice import process, record
from vllm_diffusion.kernel_choice.cases import Served, published_26b
from vllm_diffusion.kernel_choice.self_check import NothingRightError, checked_choices
from vllm_diffusion.startup.kernel_choices import KernelChoices

GPU = "NVIDIA H200 9.0"
# Device, noise, two kinds of layers, statistics, kept rows.
NUM_CASES = 2 + 2 + 2


def served(**choices: object) -> Served:
    return replace(published_26b(), choices=KernelChoices(**choices))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Cases run in the stand-in; the file with the name of each that ran."""
    monkeypatch.setattr(process, "COMMAND", COMMAND)
    monkeypatch.setattr(process, "CASE_SECONDS", 2.0)
    monkeypatch.setenv("STAND_INS_LOG", str(tmp_path / "ran"))
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


TRITON_512 = "of 512, full, triton"
# How Triton's kernel of one kind of layer fails -> part of the warning's reason.
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
    """The implementation is replaced, with one warning, and the rest is still checked."""
    chosen = check(tmp_path, {TRITON_512: fate})
    print(f"\n{fate}:", *lines, sep="\n  ")
    # FlashAttention-4 is the next one, and right here.
    assert chosen == KernelChoices(attention="cute")
    (warning,) = [line for line in lines if line.startswith("WARNING")]
    assert FATES[fate] in warning
    assert "In its place serves cute" in warning
    assert "doctor --gpu --report FILE" in warning


def test_what_an_implementation_refuses(tmp_path: Path, lines: list[str]) -> None:
    """It is no fault: Triton runs those layers, and must be right there."""
    refuses = {"512, full, cute": "refuses"}
    assert check(tmp_path, refuses, attention="cute") == KernelChoices(attention="cute")
    assert not [line for line in lines if line.startswith("WARNING")]
    chosen = check(tmp_path, refuses | {TRITON_512: "wrong"}, attention="cute", forgets=True)
    assert chosen.attention == "reference"


def test_the_reference_is_last(tmp_path: Path, lines: list[str]) -> None:
    """Where neither of the others is right."""
    chosen = check(tmp_path, {"full, triton": "wrong", "full, cute": "raises"})
    assert chosen == KernelChoices(attention="reference")
    assert "takes many times as long" in "".join(lines)


def test_statistics_and_kept_rows(tmp_path: Path) -> None:
    chosen = check(
        tmp_path,
        {"statistics, triton": "wrong", "kept rows, triton": "crashes"},
    )
    assert (chosen.statistics, chosen.kept_rows) == ("reference", "reference")


@pytest.mark.parametrize("kernel", ["device", "noise", "512, full"])
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


def test_what_is_wrong_is_not_remembered(tmp_path: Path, lines: list[str]) -> None:
    """Each start checks it again, and says so again."""
    for _ in range(2):
        assert check(tmp_path, {TRITON_512: "wrong"}).attention == "cute"
        assert "fails on this GPU" in "".join(lines)
        lines.clear()
    (path,) = tmp_path.rglob("self-check-*.json")
    states = {case["state"] for case in json.loads(path.read_text())["cases"].values()}
    assert states == {"right"}
    assert check(tmp_path) == KernelChoices()


@pytest.mark.parametrize("fate", ["out of memory", "is killed"])
def test_nothing_is_known(fate: str, tmp_path: Path, lines: list[str], stand_ins: Path) -> None:
    """What is no fault of the kernel leaves it where it is, and is not remembered."""
    assert check(tmp_path, {TRITON_512: fate}) == KernelChoices()
    assert "nothing is known of 1 kernels" in "".join(lines)
    check(tmp_path)
    assert stand_ins.read_text().count(TRITON_512) == 2, "it was remembered"


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


@pytest.mark.parametrize("content", ["{", '{"cases": {"a": {"state": "splendid"}}}'])
def test_a_damaged_record(content: str, tmp_path: Path, lines: list[str], stand_ins: Path) -> None:
    """One line, the kernels are checked, and the record is written anew."""
    path = record.Record(tmp_path, record.facts_of(GPU)).path
    path.parent.mkdir()
    path.write_text(content)
    check(tmp_path)
    assert len(stand_ins.read_text().splitlines()) == NUM_CASES
    (line,) = [line for line in lines if line.startswith("WARNING")]
    assert "damaged" in line
    check(tmp_path)
    assert len(stand_ins.read_text().splitlines()) == NUM_CASES


def test_a_changed_driver_makes_it_stale(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path)
    facts = record.facts_of(GPU) | {"driver": "600.1"}
    monkeypatch.setattr("vllm_diffusion.kernel_choice.self_check.facts_of", lambda gpu: facts)
    check(tmp_path)
    assert "all remembered" not in "".join(lines)


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

    def start() -> None:
        checked_choices(served(), device="cuda:0", gpu=GPU, folder=tmp_path, forgets=False)

    servers = [threading.Thread(target=start) for _ in range(2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    ran = stand_ins.read_text().splitlines()
    assert len(ran) == NUM_CASES, "a kernel was checked twice"
