"""``vllm-diffusion calibrate online``: rounds that end without a swap, and work that yields; the
test of a swap is in ``end_to_end``.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.engines.commands import status_of
from vllm_diffusion.cli.client import ServerError
from vllm_diffusion.drafting.commands import recalibrate
from vllm_diffusion.drafting.commands.recalibrate import IdleWorkError, run_while_idle


@pytest.mark.parametrize(
    ("failing", "said", "is_kept"),
    [
        ("", "That is not 2 % more", False),
        ("training", "training reached the cap", False),
        ("comparison", "no recorded answers are held out", False),
        ("swap", "was not taken: it does not fit", True),
    ],
)
def test_round_without_a_swap(
    failing: str, said: str, is_kept: bool, tmp_path: Path, monkeypatch, capsys
) -> None:
    """A round that ends without a swap prints one sentence, the server keeps its draft, and a
    trained draft that is not better is deleted.
    """
    (tmp_path / "config.json").touch()
    drafts, recording = tmp_path / "drafts", tmp_path / "recording.jsonl"
    recording.write_text('{"time": 1, "prompt_token_ids": [5], "output_token_ids": [6, 7]}')

    def run(command: list[str], *_: object) -> float:
        trained = Path(command[command.index("--out") + 1])
        trained.mkdir()
        if failing == "training":
            raise IdleWorkError("training reached the cap of 1 minutes.")
        if failing != "comparison":
            figures = {"new": 5.0, "old": 2.0, "is_better": failing == "swap"}
            (trained / "comparison.json").write_text(json.dumps(figures))
        return 60.0

    # The answer with the served draft, and then the refusal of a new one.
    ask = mock.Mock(side_effect=[{"model": tmp_path}] * 2 + [ServerError("it does not fit")])
    monkeypatch.setattr(recalibrate, "_is_busy", lambda _: False)
    monkeypatch.setattr(recalibrate, "end_with_signals", lambda: None)
    monkeypatch.setattr(recalibrate, "ask_draft", ask)
    monkeypatch.setattr(recalibrate, "run_while_idle", run)
    words: list[Any] = ["--url", "http://127.0.0.1:9", "--target", "the/target"]
    words += ["--recording", recording, "--drafts", drafts]
    words += ["--exchanges", "1"]
    monkeypatch.setattr(recalibrate, "_IDLE_SECONDS", 0.0)
    # The first round is the only one: a second would wait for exchanges that nobody has.
    monkeypatch.setattr(recalibrate.time, "sleep", mock.Mock(side_effect=KeyboardInterrupt))
    assert status_of("calibrate", "online", *words) == 130
    assert said in capsys.readouterr().err
    assert (ask.call_count == 3) is is_kept
    assert bool([*drafts.iterdir()]) is is_kept


# Writes a line every few milliseconds, and ends when a file appears.
WRITES = """
import os, sys, time
folder = sys.argv[1]
with open(folder + "/lines", "w", buffering=1) as lines:
    while not os.path.exists(folder + "/end"):
        lines.write("x")
        lines.flush()
        time.sleep(0.005)
open(folder + "/niceness", "w").write(str(os.nice(0)))
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_halted_while_busy(tmp_path: Path, capsys) -> None:
    """While the server is busy the command is halted and its time does not count; it runs at the
    lowest priority.
    """
    lines = tmp_path / "lines"
    sizes: list[int] = []

    def is_busy() -> bool:
        if not lines.exists() or not lines.stat().st_size:
            return False
        sizes.append(lines.stat().st_size)
        # Five looks; the last one lets it go on, and end.
        if len(sizes) == 5:
            (tmp_path / "end").touch()
        return len(sizes) < 5

    start = time.monotonic()
    spent = run_while_idle(python(WRITES, str(tmp_path)), is_busy, 60.0, 2**33)
    assert (tmp_path / "niceness").read_text() == "19"
    # The first look is before the signal.
    assert len(set(sizes[1:5])) == 1
    said = capsys.readouterr().err
    assert said == "training: halted, the server has work\ntraining: goes on\n"
    assert 0 < spent < time.monotonic() - start - 1


def test_commands_that_fail(tmp_path: Path) -> None:
    """A command that fails, or reaches the limit of time or of memory, ends with an error that
    names the reason.
    """
    fills = "import time; x = bytearray(2**27); time.sleep(60)"
    for code, limits, message in (
        ("import sys; sys.exit('no such thing')", (60.0, 2**33), "failed: no such thing"),
        (WRITES, (0.1, 2**33), r"reached the cap of 0\.\d+ minutes"),
        (fills, (60.0, 2**26), r"reached the cap of 0\.0625 GiB of memory"),
    ):
        with pytest.raises(IdleWorkError, match=f"training {message}"):
            run_while_idle(python(code, str(tmp_path)), lambda: False, *limits)
