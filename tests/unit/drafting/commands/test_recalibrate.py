"""``vllm-diffusion calibrate online``: when a round begins, and what becomes of its draft."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import status_of
from vllm_diffusion.cli.client import ServerError
from vllm_diffusion.drafting.commands import recalibrate
from vllm_diffusion.drafting.commands.recalibrate import IdleWork, IdleWorkError

URL = "http://127.0.0.1:9"


def write_recording(num_exchanges: int, first: int = 1) -> None:
    Path("recording").mkdir(exist_ok=True)
    with Path("recording/engine0-00000000.jsonl").open("a") as file:
        for at in range(first, first + num_exchanges):
            exchange = {"time": float(at), "prompt_token_ids": [5], "output_token_ids": [6, 7]}
            file.write(json.dumps(exchange) + "\n")


class Surroundings:
    """A server, and the commands of a round.

    Attributes:
        draft: What the server serves.
        swapped: Drafts that it was given.
        refusal: Why it takes none; empty if it does.
        busy: Looks at which it has work.
        commands: Of a round, by name.
        ends: The command that reaches its cap.
        is_better: What the comparison finds.
    """

    def __init__(self, draft: Path) -> None:
        self.draft = draft
        self.swapped: list[Path] = []
        self.refusal = self.ends = ""
        self.busy: list[bool] = []
        self.commands: dict[str, list[str]] = {}
        self.is_better = True

    def swap(self, _: object, model: Path) -> dict[str, Any]:
        if self.refusal:
            raise ServerError(self.refusal)
        assert (model / "config.json").is_file()
        self.swapped.append(model)
        return {"model": str(model), "replaced": str(self.draft)}

    def run(self, name: str, command: list[str]) -> str:
        self.commands[name] = command
        if name == "training":
            out = Path(command[command.index("--out") + 1])
            out.mkdir()
            (out / "config.json").write_text("{}")
        if name == self.ends:
            raise IdleWorkError(f"{name} reached the cap of 1 minutes.")
        figures = {"new": 5.0, "old": 2.0, "is_better": self.is_better}
        return f"a warning\n{json.dumps(figures)}\n"


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    Path("old/config.json").write_text("{}")
    made = Surroundings(tmp_path / "old")
    monkeypatch.setattr(recalibrate, "_is_busy", lambda _: bool(made.busy and made.busy.pop(0)))
    monkeypatch.setattr(recalibrate, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(recalibrate, "end_with_signals", lambda: None)
    monkeypatch.setattr(recalibrate, "ask_draft", lambda _: {"model": made.draft})
    monkeypatch.setattr(recalibrate, "swap", made.swap)
    monkeypatch.setattr(IdleWork, "run", lambda _, *arguments: made.run(*arguments))
    return made


def online(*arguments: str) -> int:
    words = ["--url", URL, "--target", "the/target", "--recording", "recording"]
    words += ["--drafts", "drafts", "--rounds", "1", "--idle-seconds", "0", "--exchanges", "3"]
    return status_of("calibrate", "online", *words, *arguments)


def test_better_draft(around: Surroundings) -> None:
    """Extracted with the served draft, trained from it, compared with it, and swapped in."""
    write_recording(3)
    assert online("--steps", "7", "--max-model-len", "64") == 0
    (new,) = Path("drafts").absolute().iterdir()
    assert around.swapped == [new]
    extraction, training, comparison = around.commands.values()
    old = str(around.draft)
    assert extraction[extraction.index("--draft") + 1] == old
    assert extraction[-2:] == ["--max-model-len", "64"]
    assert training[training.index("--from") + 1] == old
    assert training[training.index("--steps") + 1] == "7"
    assert comparison[-2:] == [str(new), old]


@pytest.mark.parametrize(
    ("change", "said", "is_kept"),
    [
        ({"is_better": False}, "That is not 2 % more", False),
        ({"ends": "extraction"}, "extraction reached the cap", False),
        ({"ends": "training"}, "training reached the cap", False),
        ({"ends": "comparison"}, "comparison reached the cap", False),
        ({"refusal": "it does not fit"}, "was not taken: it does not fit", True),
    ],
)
def test_round_without_a_swap(
    change: dict[str, Any],
    said: str,
    is_kept: bool,
    around: Surroundings,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sentence, the server keeps its draft, and nothing is left of one that is not better."""
    write_recording(3)
    vars(around).update(change)
    assert online() == 0
    assert said in capsys.readouterr().err
    assert not around.swapped
    assert bool(list(Path("drafts").iterdir())) is is_kept


GIB = 2**30
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


def work(is_busy: Callable[[], bool] = lambda: False, **caps: float) -> tuple[IdleWork, list[str]]:
    """Return what runs commands, and what it reports."""
    said: list[str] = []
    options = {"seconds": 60.0, "max_bytes": 8 * GIB} | caps
    return IdleWork(is_busy, options["seconds"], int(options["max_bytes"]), said.append), said


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_halted_while_busy(tmp_path: Path) -> None:
    """Not a line is written meanwhile, and the time does not count; niced."""
    lines = tmp_path / "lines"
    sizes: list[int] = []

    def is_busy() -> bool:
        if not lines.exists() or not lines.stat().st_size:
            return False
        sizes.append(lines.stat().st_size)
        # Ten looks; the last one lets it go on, and end.
        if len(sizes) == 10:
            (tmp_path / "end").touch()
        return len(sizes) < 10

    made, said = work(is_busy)
    start = time.monotonic()
    assert made.run("writing", python(WRITES, str(tmp_path))) == "niceness 19\n"
    # The first look is before the signal.
    assert len(set(sizes[1:10])) == 1
    assert said == ["writing: halted, the server has work", "writing: goes on"]
    assert made.spent < time.monotonic() - start - 1


def test_commands_that_fail(tmp_path: Path) -> None:
    """By themselves, at the cap of time of several commands, and of memory; nothing is left running."""
    made, _ = work(seconds=1.0)
    with pytest.raises(IdleWorkError, match="a first failed: no such thing"):
        made.run("a first", python("import sys, time; time.sleep(0.3); sys.exit('no such thing')"))
    assert 0.2 < made.spent < 1
    with pytest.raises(IdleWorkError, match=r"a second reached the cap of 0\.0166667 minutes"):
        made.run("a second", python(WRITES, str(tmp_path)))
    size = (tmp_path / "lines").stat().st_size
    time.sleep(0.1)
    assert (tmp_path / "lines").stat().st_size == size
    filled, _ = work(max_bytes=GIB / 16)
    with pytest.raises(IdleWorkError, match=r"filling reached the cap of 0\.0625 GiB of memory"):
        filled.run("filling", python("import time; x = bytearray(2**27); time.sleep(60)"))
