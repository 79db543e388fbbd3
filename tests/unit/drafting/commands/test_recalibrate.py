"""``vllm-diffusion calibrate online``: when a round begins, and what becomes of its draft."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import status_of
from vllm_diffusion.drafting.commands import recalibrate
from vllm_diffusion.drafting.commands.recalibrate import IdleWork, IdleWorkError
from vllm_diffusion.drafting.commands.swap_draft import DraftClient, SwapError


def write_recording(folder: Path, num_exchanges: int, first: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"time": float(at), "prompt_token_ids": [5], "output_token_ids": [6, 7]})
        for at in range(first, first + num_exchanges)
    ]
    with (folder / "engine0-00000000.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")


class Server:
    """Its answers, and what it was asked."""

    def __init__(self, draft: Path) -> None:
        self.draft = draft
        self.swapped: list[Path] = []
        self.state = "kept"
        self.refusal = ""
        # Looks at which it has work.
        self.busy: list[bool] = []

    def status(self, *_: Any) -> dict[str, Any]:
        return {"model": str(self.draft), "swap": None}

    def swap(self, _: Any, model: Path, verifications: int) -> dict[str, Any]:
        if self.refusal:
            raise SwapError(self.refusal)
        assert (model / "config.json").is_file()
        self.swapped.append(model)
        nothing = {"verifications": 0}
        swap = {"model": str(model), "replaced": str(self.draft), "state": self.state}
        swap |= {"reason": "why", "before": nothing, "after": nothing}
        return {"model": str(model), "swap": swap}

    def is_busy(self, _: str) -> bool:
        return self.busy.pop(0) if self.busy else False


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    draft = tmp_path / "old"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    made = Server(draft)
    monkeypatch.setattr(recalibrate, "_is_busy", made.is_busy)
    monkeypatch.setattr(recalibrate, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(recalibrate, "end_with_signals", lambda: None)
    monkeypatch.setattr(DraftClient, "status", made.status)
    monkeypatch.setattr(DraftClient, "swap", lambda self, *arguments: made.swap(self, *arguments))
    return made


class Work:
    """What each command prints, or what ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_better: bool = True) -> None:
        self.commands: dict[str, list[str]] = {}
        self.ends = ""
        figures = {"new": 5.0, "old": 2.0, "verifications": [9, 9], "is_better": is_better}
        self.prints = {"extraction": "samples\n", "training": "trained\n"}
        self.prints["comparison"] = f"a warning\n{json.dumps(figures)}\n"
        monkeypatch.setattr(IdleWork, "run", lambda _, *arguments: self.run(*arguments))

    def run(self, name: str, command: list[str]) -> str:
        self.commands[name] = command
        if name == "training":
            out = Path(command[command.index("--out") + 1])
            out.mkdir()
            (out / "config.json").write_text("{}")
        if name == self.ends:
            raise IdleWorkError(f"{name} reached the cap of 1 minutes.")
        return self.prints[name]


def online(tmp_path: Path, *arguments: str) -> int:
    words = ["--url", "http://127.0.0.1:9", "--target", "the/target"]
    words += ["--recording", str(tmp_path / "recording"), "--drafts", str(tmp_path / "drafts")]
    words += ["--rounds", "1", "--idle-seconds", "0", "--exchanges", "3", *arguments]
    return status_of("calibrate", "online", *words)


def kept_drafts(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "drafts").iterdir())


def test_better_draft(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extracted with the served draft, trained from it, compared with it, and swapped in."""
    write_recording(tmp_path / "recording", 3)
    work = Work(monkeypatch)
    assert online(tmp_path, "--steps", "7", "--max-model-len", "64") == 0
    (new,) = kept_drafts(tmp_path)
    assert server.swapped == [new]
    extraction, training, comparison = work.commands.values()
    old = str(server.draft)
    assert extraction[extraction.index("--draft") + 1] == old
    assert extraction[-2:] == ["--max-model-len", "64"]
    assert training[training.index("--from") + 1] == old
    assert training[training.index("--steps") + 1] == "7"
    assert comparison[-2:] == [str(new), old]


def test_draft_that_is_not_better(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never reaches the server."""
    write_recording(tmp_path / "recording", 3)
    Work(monkeypatch, is_better=False)
    assert online(tmp_path) == 0
    assert not server.swapped
    assert not kept_drafts(tmp_path)


@pytest.mark.parametrize("ends", ["extraction", "training", "comparison"])
def test_caps(
    ends: str,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The round ends, the server keeps its draft, and nothing is left of the new one."""
    write_recording(tmp_path / "recording", 3)
    Work(monkeypatch).ends = ends
    assert online(tmp_path) == 0
    assert f"{ends} reached the cap" in capsys.readouterr().err
    assert not server.swapped
    assert not kept_drafts(tmp_path)


def test_refused_by_the_server(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sentence; the next round may do better."""
    write_recording(tmp_path / "recording", 3)
    Work(monkeypatch)
    server.refusal = "a swap is pending"
    assert online(tmp_path) == 0
    assert "was not taken: a swap is pending" in capsys.readouterr().err


def test_rounds_need_new_traffic(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one round has seen does not begin another; a busy server begins none."""
    recording = tmp_path / "recording"
    write_recording(recording, 4)
    url = "http://127.0.0.1:9"
    arguments: Any = SimpleNamespace(url=url, recording=recording, exchanges=3, idle_seconds=0.0)
    rounds = recalibrate._Rounds(arguments, DraftClient(url))
    server.busy = [True, True, False]
    rounds.wait()
    assert not server.busy
    assert rounds.until == 4.0
    looks = iter(range(10))

    def more(_: float) -> None:
        write_recording(recording, 1, first=5 + next(looks))

    monkeypatch.setattr(recalibrate.time, "sleep", more)
    rounds.wait()
    assert rounds.until == 7.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "record"),
        (("--minutes", "0"), "--minutes"),
        (("--gib", "-1"), "--gib"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...],
    words: str,
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is waited for: there is no recording, or a cap is none."""
    if arguments:
        write_recording(tmp_path / "recording", 3)
    assert online(tmp_path, *arguments) == 2
    assert words in capsys.readouterr().err


def test_published_draft(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training starts from files."""
    write_recording(tmp_path / "recording", 3)
    server.draft = Path("z-lab/a-draft")
    assert online(tmp_path) == 1
    assert "start the server with the path of its draft" in capsys.readouterr().err


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


def work(is_busy: Callable[[], bool] = lambda: False, **caps: float) -> IdleWork:
    said: list[str] = []
    options = {"seconds": 60.0, "max_bytes": 8 * GIB} | caps
    made = IdleWork(is_busy, options["seconds"], int(options["max_bytes"]), said.append)
    made.said = said  # type: ignore[attr-defined]
    return made


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_output_and_failure() -> None:
    """What a command printed, or its last line where it fails."""
    assert work().run("counting", python("print(1 + 1)")) == "2\n"
    with pytest.raises(IdleWorkError, match="counting failed: no such thing"):
        work().run("counting", python("import sys; sys.exit('no such thing')"))


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

    made = work(is_busy)
    start = time.monotonic()
    printed = made.run("writing", python(WRITES, str(tmp_path)))
    assert printed == "niceness 19\n"
    # The first look is before the signal.
    assert len(set(sizes[1:10])) == 1
    assert made.said == ["writing: halted, the server has work", "writing: goes on"]
    assert made.spent < time.monotonic() - start - 1


def test_caps_of_commands(tmp_path: Path) -> None:
    """Of time, over several commands, and of memory; nothing is left running."""
    made = work(seconds=1.0)
    made.run("a first", python("import time; time.sleep(0.3)"))
    assert 0.2 < made.spent < 1
    with pytest.raises(IdleWorkError, match=r"a second reached the cap of 0\.0166667 minutes"):
        made.run("a second", python(WRITES, str(tmp_path)))
    size = (tmp_path / "lines").stat().st_size
    time.sleep(0.1)
    assert (tmp_path / "lines").stat().st_size == size
    with pytest.raises(IdleWorkError, match=r"filling reached the cap of 0\.0625 GiB of memory"):
        work(max_bytes=GIB / 16).run(
            "filling", python("import time; x = bytearray(2**27); time.sleep(60)")
        )
