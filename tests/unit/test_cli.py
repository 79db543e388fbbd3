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
from pathlib import Path

import pytest

from tests.support import command_server
from tests.support.commands import status_of
from vllm_diffusion.cli import checkpoint, demo, server
from vllm_diffusion.cli.main import main


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a fake server's command line; its log and its key are in a folder of the test."""
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    return command_server.command


@pytest.fixture
def run_demo(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
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


def processes_of(log: str) -> list[int]:
    """Ids of the fake server and of its child."""
    words = log.split()
    return [int(words[words.index("pid") + 1]), int(words[words.index("child") + 1])]


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {pids}"
        time.sleep(0.05)


def test_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """The path, alone on standard output; DiffusionGemma's unless another family is asked for."""
    for arguments, name in (
        ([], "tiny_diffusion_gemma"),
        (["--family", "diffusion_gemma"], "tiny_diffusion_gemma"),
        (["--family", "sdar"], "tiny_sdar"),
        (["--family", "qwen3"], "tiny_qwen3"),
        (["--draft"], "tiny_qwen3_dflash"),
        (["--family", "qwen3", "--draft"], "tiny_qwen3_dflash"),
    ):
        assert main(["checkpoint", *arguments]) == 0
        folder = Path(capsys.readouterr().out.removesuffix("\n"))
        assert folder.name == name
        assert (folder / "model.safetensors").is_file()
    assert checkpoint.shipped_checkpoint().name == "tiny_diffusion_gemma"


@pytest.mark.parametrize("family", checkpoint.FOLDERS)
def test_checkpoint_complete(family: str) -> None:
    """Everything that vLLM reads and no code, in at most 10 MB."""
    folder = checkpoint.shipped_checkpoint(family)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"chat_template.jinja", "tokenizer_config.json"}
    assert not [name for name in names if name.endswith(".py")]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 10_000_000


@pytest.mark.parametrize("family", checkpoint.FOLDERS)
def test_checkpoint_missing(family: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """One sentence that names the file, nothing on standard output."""
    monkeypatch.setitem(checkpoint.FOLDERS, family, tmp_path)
    assert main(["checkpoint", "--family", family]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert str(tmp_path / "config.json") in captured.err


def test_demo_family(run_demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo serves the checkpoint of the family that was asked for, and asks what it knows."""
    asked: list[str] = []

    def shipped(family: str) -> Path:
        asked.append(family)
        return tmp_path

    monkeypatch.setattr(checkpoint, "shipped_checkpoint", shipped)
    assert set(demo.DEFAULT_PROMPTS) == set(checkpoint.FOLDERS)
    for family, options in (("sdar", ["--family", "sdar"]), ("diffusion_gemma", [])):
        status, _, err = run_demo("good", *options)
        assert status == 0
        assert f"asking: {demo.DEFAULT_PROMPTS[family]}\n" in err
    assert asked == ["sdar", "diffusion_gemma"]


@pytest.mark.parametrize(
    "code",
    [
        "from vllm_diffusion.cli.main import main; main(['checkpoint'])",
        "import vllm_diffusion.live",
    ],
    ids=["the command", "watching canvases"],
)
def test_no_engine_import(code: str) -> None:
    """A command answers at once, and vLLM's variables may still be set: who needs the engine imports it."""
    code += (
        "; import sys; sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'openai')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "a", "b"]])
def test_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in the command line is answered with one line that says where its usage is, and status 2."""
    assert status_of(*arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--help` shows the usage" in said or "invalid choice: 'nonsense'" in said


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
    behaviour: str, run_demo, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
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


def test_demo_empty_answer(run_demo) -> None:
    """No answer is a failure, and what it took is still said."""
    status, out, err = run_demo("empty")
    assert (status, out) == (1, "")
    assert "The answer is empty." in err


def test_demo_server_dies(run_demo, tmp_path: Path) -> None:
    """The end of its log is printed, the whole log stays, and its child does not."""
    status, out, err = run_demo("dies")
    assert (status, out) == (1, "")
    assert "stopped with exit status 3 before it was ready" in err
    assert "ValueError: no such thing" in err
    (log,) = tmp_path.glob("*.log")
    assert str(log) in err
    assert_gone(processes_of(log.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("behaviour", "said"), [("refuses", "too long"), ("breaks-off", "broke off in mid-answer")]
)
def test_demo_refused(behaviour: str, said: str, run_demo) -> None:
    """What the server said, in a sentence and no stack trace."""
    status, _, err = run_demo(behaviour)
    assert status == 1
    assert said in err
    assert "Traceback" not in err


def test_demo_disabled(run_demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo never shows stock vLLM's answer as ours."""
    monkeypatch.setenv("VLLM_DIFFUSION_DISABLE", "1")
    status, _, err = run_demo("good")
    assert status == 1
    assert "unset it" in err


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_demo_interrupted(kind: signal.Signals, command, tmp_path: Path) -> None:
    """Ctrl-C and an end from outside stop the server and its child, without a stack trace."""
    code = (
        "import sys, tempfile, pathlib; from vllm_diffusion.cli import main, checkpoint; "
        f"tempfile.tempdir = {str(tmp_path)!r}; "
        f"checkpoint.shipped_checkpoint = lambda family: pathlib.Path({str(tmp_path)!r}); "
        f"checkpoint.vllm_serve = lambda *_: {command('never-ready')!r}; "
        "sys.exit(main.main(['demo']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (logs := [p for p in tmp_path.glob("*.log") if "Resolved" in p.read_text()]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = processes_of(logs[0].read_text(encoding="utf-8"))
    process.send_signal(kind)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("Interrupted.\n")
    assert "Traceback" not in err
    assert_gone(pids)
    assert not list(tmp_path.glob("*.log"))


def test_interrupted_while_it_begins(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is there already is not left behind."""
    begun = []

    class Interrupting(subprocess.Popen):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            begun.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(server.subprocess, "Popen", Interrupting)
    starting = server.Server(command("never-ready"), report=print, timeout=60.0)
    with pytest.raises(KeyboardInterrupt), starting:
        pass
    monkeypatch.undo()
    assert_gone(begun)
    assert not starting.log_path.exists()


def test_server_timeout(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is never ready is given up; its progress is said until then."""
    monkeypatch.setattr(server, "_REPORT_SECONDS", 0.2)
    said: list[str] = []
    started = server.Server(command("never-ready"), report=said.append, timeout=3.0)
    with pytest.raises(server.ServerError, match="not ready after 3 s"), started:
        pass
    assert said
    assert said[-1].endswith("starting the engine's process")
    assert_gone(processes_of(started.log_end()))


def test_server_stubborn(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ignores SIGINT and SIGTERM is killed, with its child."""
    patience = ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0))
    monkeypatch.setattr(server, "_STOP_SECONDS", patience)
    with server.Server(command("stubborn"), report=print, timeout=60.0) as started:
        pids = processes_of(started.log_end())
    assert_gone(pids)


def test_server_interrupted_stop(command) -> None:
    """A second Ctrl-C, while the server is taking its time to stop, kills it at once."""
    started = server.Server(command("stubborn"), report=print, timeout=60.0)
    started.__enter__()
    pids = processes_of(started.log_end())
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        started.__exit__(None)
    assert_gone(pids)


def test_vllm_serve() -> None:
    """This machine only, and no key among the arguments."""
    arguments = server.vllm_serve("model", "--max-num-seqs", "2")
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert not any("key" in argument for argument in arguments)


def test_vllm_command() -> None:
    """What was imported is not looked at for garbage, what is made later is, and the engine is forked."""
    told = (
        "print(gc.get_freeze_count(), gc.isenabled(), os.environ['VLLM_WORKER_MULTIPROC_METHOD'])"
    )
    lines = (
        "import gc, os, runpy, vllm.entrypoints.cli.main as command",
        f"command.main = lambda: {told}",
        f"runpy.run_module({server.VLLM_SERVE[2]!r}, run_name='__main__')",
    )
    environment = {**os.environ, "VLLM_DIFFUSION_CPU": "1"}
    environment.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
    )
    frozen, *rest = done.stdout.split()
    assert int(frozen) > 100_000, done.stderr
    assert rest == ["True", "fork"]
