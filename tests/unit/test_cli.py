"""The ``vllm-diffusion`` command, with a few lines of HTTP server where vLLM would be."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.command_server import command
from vllm_diffusion.cli import checkpoint, server
from vllm_diffusion.cli.main import main


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers log to a folder of the test."""
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def run_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Runs ``vllm-diffusion demo`` against a fake server."""
    # The test's process keeps its own signal handlers.
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())
    monkeypatch.setattr(checkpoint, "shipped_checkpoint", lambda family: tmp_path)

    def run(behaviour: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(checkpoint, "vllm_serve", lambda *_: command(behaviour))
        status = main(["demo", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be collected."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def assert_gone(log: str) -> None:
    """The fake server and its child have ended."""
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
        (("--family", "qwen3"), "tiny_qwen3"),
        (("--draft",), "tiny_qwen3_dflash"),
    ],
)
def test_checkpoint(
    arguments: tuple[str, ...], name: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """The path, alone on standard output, of everything that vLLM reads, in at most 10 MB; or the missing file."""
    assert main(["checkpoint", *arguments]) == 0
    folder = Path(capsys.readouterr().out.removesuffix("\n"))
    assert folder.name == name
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert files.keys() >= {"config.json", "model.safetensors"}
    assert "--draft" in arguments or "chat_template.jinja" in files
    assert sum(files.values()) <= 10_000_000
    for folders in (checkpoint.FOLDERS, checkpoint.DRAFT_FOLDERS):
        for family in folders:
            monkeypatch.setitem(folders, family, tmp_path)
    assert main(["checkpoint", *arguments]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert str(tmp_path / "config.json") in captured.err


def test_demo(run_demo, tmp_path: Path) -> None:
    """The answer alone on standard output, harmless to a terminal; figures on standard error."""
    status, out, err = run_demo("good", "What is 7+8?")
    assert status == 0
    assert out == "15\N{REPLACEMENT CHARACTER}[2J\n"
    assert "denoise steps per canvas  4.0  (4 steps, 1 canvas)" in err
    assert "tokens per pass           0.5  (3 tokens, 6 passes" in err
    assert "tokens per second" in err
    # vLLM's own counters count all tokens of a canvas, also those behind the answer's end.
    assert re.findall(r"(\d+) (?:committed )?tokens", err) == ["3"]
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.parametrize("behaviour", ["drafts", "drafts-otherwise"])
def test_demo_draft(
    behaviour: str, run_demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Two servers, the second with the draft; what a verification gave; a difference is a failure."""
    (tmp_path / "config.json").write_text('{"block_size": 8}', encoding="utf-8")
    monkeypatch.setattr(checkpoint, "shipped_draft", lambda family: tmp_path)
    served: list[tuple[str, ...]] = []

    def serve(model: str, *options: str) -> list[str]:
        served.append(options)
        return command(behaviour if "--speculative-config" in options else "good")

    monkeypatch.setattr(checkpoint, "vllm_serve", serve)
    status = main(["demo", "--draft"])
    said = capsys.readouterr().err
    assert len(served) == 2
    assert served[1][:-2] == served[0]
    assert json.loads(served[1][-1]) == {
        "method": "dflash",
        "model": str(tmp_path),
        "num_speculative_tokens": 7,
    }
    assert "6.5  (2 verifications, 11 of 14 proposals kept)" in said
    agrees = behaviour == "drafts"
    assert status == (0 if agrees else 1)
    assert ("The same answer" in said, "answered otherwise" in said) == (agrees, not agrees)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("empty", "The answer is empty."),
        ("refuses", "too long"),
        ("breaks-off", "broke off in mid-answer"),
        ("dies", "stopped with exit status 3 before it was ready"),
    ],
)
def test_demo_fails(behaviour: str, said: str, run_demo, tmp_path: Path) -> None:
    """What the server said, and no stack trace; of one that dies the end of its log, which stays."""
    status, _, err = run_demo(behaviour)
    assert status == 1
    assert said in err
    assert "Traceback" not in err
    assert ("ValueError: no such thing" in err) == (behaviour == "dies")
    for log in tmp_path.glob("*.log"):
        assert str(log) in err
        assert_gone(log.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_demo_interrupted(kind: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C and an end from outside stop the server and its child, without a stack trace."""
    code = (
        "import sys, tempfile, pathlib; from vllm_diffusion.cli import main, checkpoint; "
        f"tempfile.tempdir = {str(tmp_path)!r}; "
        f"checkpoint.shipped_checkpoint = lambda family: pathlib.Path({str(tmp_path)!r}); "
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
    """A server that ignores SIGINT and SIGTERM is killed, with its child; at once by a second Ctrl-C."""
    patience = 30.0 if is_impatient else 0.5
    kinds = (signal.SIGINT, patience), (signal.SIGTERM, patience)
    monkeypatch.setattr(server, "_STOP_SECONDS", kinds)
    started = server.Server(command("stubborn"), report=print, timeout=60.0)
    with pytest.raises(KeyboardInterrupt) if is_impatient else nullcontext(), started:
        log = started.log_end()
        if is_impatient:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert_gone(log)
