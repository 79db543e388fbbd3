"""Tests of ``checkpoint`` and ``demo`` with a fake vLLM server; ``end_to_end`` has a real one."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.doubles.fake_server import command
from vllm_diffusion.checkpoints import DRAFT_FOLDERS, FOLDERS
from vllm_diffusion.cli import checkpoint, server
from vllm_diffusion.cli.main import main


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers log, and note the requests that they get, in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))


def is_running(pid: int) -> bool:
    """Return whether a process is running and not merely waiting to be collected."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def assert_gone(log: str) -> None:
    """Check that the fake server and its child have ended."""
    words = log.split()
    pids = [int(words[words.index(name) + 1]) for name in ("pid", "child")]
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {pids}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((), "tiny_diffusion_gemma"),
        (("--family", "sdar"), "tiny_sdar"),
        (("--family", "mineru"), "tiny_mineru"),
        (("--draft",), "tiny_qwen3_dflash"),
    ],
)
def test_checkpoint(
    arguments: tuple[str, ...], name: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Standard output has the path alone, or else one line names the missing file."""
    assert main(["checkpoint", *arguments]) == 0
    assert Path(capsys.readouterr().out.removesuffix("\n")).name == name
    for folders in (FOLDERS, DRAFT_FOLDERS):
        for family in folders:
            monkeypatch.setitem(folders, family, tmp_path)
    assert main(["checkpoint", *arguments]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert str(tmp_path / "config.json") in captured.err


@pytest.mark.parametrize(
    ("behaviour", "arguments", "status", "said"),
    [
        ("good", (), 0, "4.0  (4 steps, 1 canvas)\n  tokens per pass           0.5  (3 tokens, 6"),
        ("drafts", ("--draft",), 0, "4.5  (2 verifications, 7 of 8 proposals kept)"),
        ("drafts-otherwise", ("--draft",), 1, "answer changed with its draft"),
        ("empty", (), 1, "The answer is empty."),
        ("refuses", (), 1, "too long"),
        ("breaks-off", (), 1, "broke off in mid-answer"),
        ("dies", (), 1, "ValueError: behind it"),
        ("dies", (), 1, "stopped with exit status 3 before it was ready"),
    ],
)
def test_demo(
    behaviour: str,
    arguments: tuple[str, ...],
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch,
    capsys,
) -> None:
    """The demo prints an escaped answer and its figures, or one line and a failed server's log."""
    (tmp_path / "config.json").write_text('{"block_size": 8}', encoding="utf-8")
    # The test's process keeps its own signal handlers.
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())
    monkeypatch.setattr(checkpoint, "shipped_checkpoint", lambda family: tmp_path)
    monkeypatch.setattr(checkpoint, "shipped_draft", lambda family: tmp_path)

    def serve(_: str, *options: str) -> list[str]:
        is_first = bool(arguments) and "--speculative-config" not in options
        return command("good" if is_first else behaviour)

    monkeypatch.setattr(checkpoint, "vllm_serve", serve)
    assert main(["demo", *arguments]) == status
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out.startswith("15\N{REPLACEMENT CHARACTER}[2J\n") or status == 1
    for log in tmp_path.glob("*.log"):
        assert status == 1
        assert str(log) in captured.err
        assert_gone(log.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_demo_interrupted(kind: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C or a signal stops the server and its child without a stack trace."""
    code = (
        "import sys, tempfile; from vllm_diffusion.cli import main, checkpoint; "
        f"tempfile.tempdir = {str(tmp_path)!r}; "
        f"checkpoint.vllm_serve = lambda *_: {command('never-ready')!r}; "
        "sys.exit(main.main(['demo']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("starting the engine's process" in x for x in iter(process.stderr.readline, ""))
    log = next(tmp_path.glob("*.log")).read_text(encoding="utf-8")
    process.send_signal(kind)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("Interrupted.\n")
    assert "Traceback" not in err
    assert_gone(log)
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.parametrize("is_impatient", [False, True])
def test_server_stubborn(is_impatient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ignores signals is killed with its child, at once by a second Ctrl-C."""
    patience = 30.0 if is_impatient else 0.5
    kinds = (signal.SIGINT, patience), (signal.SIGTERM, patience)
    monkeypatch.setattr(server, "_STOP_SECONDS", kinds)
    started = server.Server(command("stubborn"), report=print, timeout=60.0)
    with pytest.raises(KeyboardInterrupt) if is_impatient else nullcontext(), started:
        log = started.log_end()
        if is_impatient:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert_gone(log)
