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
from vllm_diffusion.drafting.commands.recalibrate import IdleWork, IdleWorkError


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

    def run(_: IdleWork, name: str, command: list[str]) -> str:
        trained = Path(command[command.index("--out") + 1])
        trained.mkdir()
        if name == failing:
            raise IdleWorkError(f"{name} reached the cap of 1 minutes.")
        if failing != "comparison":
            figures = {"new": 5.0, "old": 2.0, "is_better": failing == "swap"}
            (trained / "comparison.json").write_text(json.dumps(figures))
        return ""

    # The answer with the served draft, and then the refusal of a new one.
    ask = mock.Mock(side_effect=[{"model": tmp_path}] * 2 + [ServerError("it does not fit")])
    monkeypatch.setattr(recalibrate, "_is_busy", lambda _: False)
    monkeypatch.setattr(recalibrate, "end_with_signals", lambda: None)
    monkeypatch.setattr(recalibrate, "ask_draft", ask)
    monkeypatch.setattr(IdleWork, "run", run)
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
print("niceness", os.nice(0))
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_halted_while_busy(tmp_path: Path) -> None:
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

    said: list[str] = []
    work = IdleWork(is_busy, 60.0, 2**33, said.append)
    start = time.monotonic()
    assert work.run("writing", python(WRITES, str(tmp_path))) == "niceness 19\n"
    # The first look is before the signal.
    assert len(set(sizes[1:5])) == 1
    assert said == ["writing: halted, the server has work", "writing: goes on"]
    assert work.spent < time.monotonic() - start - 1


def test_commands_that_fail(tmp_path: Path) -> None:
    """A command that fails, or reaches the limit of time of all commands or the limit of memory,
    ends with an error that names the reason.
    """
    work = IdleWork(lambda: False, 60.0, 2**33, pytest.fail)
    with pytest.raises(IdleWorkError, match="a first failed: no such thing"):
        work.run("a first", python("import sys; sys.exit('no such thing')"))
    assert work.spent > 0
    # What the first one took is most of what there is.
    work.seconds = work.spent + 0.1
    with pytest.raises(IdleWorkError, match=r"a second reached the cap of 0\.\d+ minutes"):
        work.run("a second", python(WRITES, str(tmp_path)))
    filled = IdleWork(lambda: False, 60.0, 2**26, pytest.fail)
    with pytest.raises(IdleWorkError, match=r"filling reached the cap of 0\.0625 GiB of memory"):
        filled.run("filling", python("import time; x = bytearray(2**27); time.sleep(60)"))
