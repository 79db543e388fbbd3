"""Tests of ``checkpoint``, ``demo`` and ``serve-page`` with a fake vLLM server; ``end_to_end`` has
a real one.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests.support.doubles.fake_server import command
from tests.support.engines.commands import status_of
from vllm_diffusion.checkpoints import DRAFT_FOLDERS, FOLDERS, shipped_checkpoint
from vllm_diffusion.cli import checkpoint, serve_page, server
from vllm_diffusion.cli.main import main
from vllm_diffusion.cli.server import free_port


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers log, and note the requests that they get, in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    # The test's process keeps its own signal handlers.
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())


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


SHIPPED = str(shipped_checkpoint())
LOCAL = ("--host", "127.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "options", "page"),
    [
        ([], [SHIPPED, "--served-model-name", "tiny", *LOCAL], "http://127.0.0.1:8000"),
        (
            [SHIPPED, "--port", "81", "--verbose", "--open"],
            [SHIPPED, "--port", "81", "--served-model-name", Path(SHIPPED).name, *LOCAL],
            "http://127.0.0.1:81",
        ),
        # A name of the user's, and a file that may hold one, come first.
        (
            [SHIPPED, "--served_model_name=a"],
            [SHIPPED, "--served_model_name=a", *LOCAL],
            "http://127.0.0.1:8000",
        ),
        ([SHIPPED, "--config", "x"], [SHIPPED, "--config", "x", *LOCAL], "http://127.0.0.1:8000"),
        (
            ["m", "--host=0.0.0.0", "--root_path", "/llm/"],
            ["m", "--host=0.0.0.0", "--root_path", "/llm/"],
            "http://localhost:8000/llm",
        ),
        (
            ["m", "--host", "fe80::1", "--ssl-certfile", __file__],
            ["m", "--host", "fe80::1", "--ssl-certfile", __file__],
            "https://[fe80::1]:8000",
        ),
    ],
)
def test_plan(arguments: list[str], options: list[str], page: str) -> None:
    """Options reach vLLM unchanged, by default with the shipped checkpoint and this machine."""
    plan = serve_page.plan_of(arguments)
    assert list(plan.options) == options
    assert plan.page == f"{page}/diffusion/"
    assert (plan.opens, plan.is_verbose) == ("--open" in arguments, "--verbose" in arguments)


def test_plugins() -> None:
    """The plugins that the user allows stay allowed, and those that the page needs are added."""
    plugins = serve_page.allowed_plugins({"VLLM_PLUGINS": "another,vllm_diffusion"})
    assert plugins == [
        "another",
        "vllm_diffusion",
        "vllm_diffusion_cpu",
        "vllm_diffusion_metrics",
        "vllm_diffusion_page",
    ]


@pytest.mark.parametrize(
    ("user", "variables", "has_terminal", "problem"),
    [
        (1000, {"DISPLAY": ":0"}, True, None),
        (0, {"DISPLAY": ":0"}, True, "this is root"),
        (1000, {"DISPLAY": ":0", "SSH_CONNECTION": "a b"}, True, "this is a session over ssh"),
        (1000, {"DISPLAY": ":0"}, False, "this is not a terminal"),
        (1000, {}, True, "there is no display"),
    ],
)
def test_browser_problem(user, variables, has_terminal, problem, monkeypatch) -> None:
    """A browser is opened only for a user who has a terminal and a display on this machine."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: has_terminal)
    assert serve_page.browser_problem(variables) == problem


def test_browser(monkeypatch) -> None:
    """The browser gets the address and no key."""
    opened = mock.Mock()
    monkeypatch.setattr(serve_page.subprocess, "Popen", opened)
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    serve_page.open_browser("http://a")
    assert opened.call_args.args == ([sys.executable, "-m", "webbrowser", "http://a"],)
    assert "the key" not in opened.call_args.kwargs["env"].values()


def test_not_started(monkeypatch, capsys) -> None:
    """No server is started for the help, on a port in use, or if the package is turned off."""
    monkeypatch.setattr(server.subprocess, "Popen", lambda *_, **__: pytest.fail("a process"))
    assert status_of("serve-page", "--help") == 0
    assert "VLLM_PLUGINS" in capsys.readouterr().out
    with server.socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert status_of("serve-page", "--port", port) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_DIFFUSION_DISABLE", "1")
    assert status_of("serve-page") == 1
    assert "unset it" in capsys.readouterr().err


def test_server_dies(monkeypatch, capsys) -> None:
    """A server that dies after it served leaves its last lines and no trace."""
    port = str(free_port())
    monkeypatch.setattr(serve_page, "VLLM_SERVE", command("dies later", port))
    assert status_of("serve-page", "--port", port) == 1
    said = capsys.readouterr().err
    assert said.index("The page answers: ") < said.index("the last line\n")
    assert "exit status 4" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_end(kind: signal.Signals, tmp_path: Path, monkeypatch) -> None:
    """The server has the page's plugin and no key, and ends with status 0 by Ctrl-C or a signal."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    code = (
        "import sys, tempfile; from vllm_diffusion.cli import main, serve_page; "
        f"tempfile.tempdir = {str(tmp_path)!r}; port = '{free_port()}'; "
        f"serve_page.VLLM_SERVE = [*{command('stays')[:-1]!r}, port]; "
        "sys.exit(main.main(['serve-page', '--open', '--port', port]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    before = [*itertools.takewhile(lambda line: "The page answers" not in line, lines)]
    assert any("so no browser is opened" in line for line in before)
    children = psutil.Process(process.pid).children()
    (environment,) = [child.environ() for child in children]
    assert "vllm_diffusion_page" in environment["VLLM_PLUGINS"]
    assert "VLLM_API_KEY" not in environment
    process.send_signal(kind)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (0 if kind is signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
