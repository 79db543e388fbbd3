"""``vllm-diffusion serve-page`` with a few lines of HTTP server where vLLM would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.command_server import command as fake_command
from tests.support.commands import status_of
from vllm_diffusion.cli import checkpoint, serve_page, server
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.cli.server import free_port

SHIPPED = str(shipped_checkpoint())
LOCAL = ("--host", "127.0.0.1")


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command with a fake server; what its process was started with is its attribute."""
    started: list[tuple[list[str], dict[str, str]]] = []
    begin = subprocess.Popen

    def popen(command, *, env=None, **options):
        if env is None:
            # What prints the log.
            return begin(command, **options)
        started.append((command, env))
        if "webbrowser" in command:
            return begin([sys.executable, "-c", ""], **options)
        port = command[command.index("--port") + 1]
        fake = [part.replace("{port}", port) for part in fake_command(serve_with.behaviour)]
        return begin(fake, env=env, **options)

    def serve_with(*arguments: str) -> int:
        return status_of("serve-page", *arguments, "--port", str(free_port()))

    serve_with.behaviour, serve_with.started = "ends", started
    monkeypatch.setattr(server.subprocess, "Popen", popen)
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    # The test's process keeps its own signal handlers.
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())
    return serve_with


@pytest.mark.parametrize(
    ("arguments", "options", "page"),
    [
        ([], [SHIPPED, "--served-model-name", "tiny", *LOCAL], "http://127.0.0.1:8000"),
        (["a/model", *LOCAL, "--open"], ["a/model", *LOCAL], "http://127.0.0.1:8000"),
        (
            [SHIPPED, "--port", "81", "--verbose"],
            [SHIPPED, "--port", "81", "--served-model-name", Path(SHIPPED).name, *LOCAL],
            "http://127.0.0.1:81",
        ),
        # A name of the user's, and a file that may hold one, come first.
        ([SHIPPED, "--served_model_name=a"], [SHIPPED, "--served_model_name=a", *LOCAL], None),
        ([SHIPPED, "--config", "x"], [SHIPPED, "--config", "x", *LOCAL], None),
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
def test_plan(arguments: list[str], options: list[str], page: str | None) -> None:
    """Options reach vLLM as they are; the shipped checkpoint and this machine where none are named."""
    plan = serve_page.plan_of(arguments)
    assert list(plan.options) == options
    assert plan.page == f"{page or 'http://127.0.0.1:8000'}/diffusion/"
    assert (plan.opens, plan.is_verbose) == ("--open" in arguments, "--verbose" in arguments)


@pytest.mark.parametrize("key", ["the key", None])
def test_served(key: str | None, serve, tmp_path: Path, monkeypatch, capsys) -> None:
    """The address is printed at the start and when it answers; a user who sets no key gets none."""
    monkeypatch.setenv("VLLM_PLUGINS", "another,vllm_diffusion")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("VLLM_API_KEY", key)
    assert serve("a/model") == 0
    ((command, environment),) = serve.started
    assert command[:5] == [*server.VLLM_SERVE, "a/model"]
    assert not any("key" in word for word in command)
    plugins = "another,vllm_diffusion,vllm_diffusion_cpu,vllm_diffusion_metrics,vllm_diffusion_page"
    assert environment["VLLM_PLUGINS"] == plugins
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment.get("VLLM_API_KEY") == key
    said = capsys.readouterr().err
    address = said.partition("The page will be at ")[2].partition("\n")[0]
    assert f"VLLM_PLUGINS={plugins}" in said
    assert f"The page answers: {address}" in said
    assert "a line of the server's" not in said
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.parametrize(
    ("user", "variables", "has_terminal", "problem"),
    [
        (1000, {"DISPLAY": ":0"}, True, None),
        (0, {"DISPLAY": ":0"}, True, "this is root"),
        (1000, {"DISPLAY": ":0", "SSH_CONNECTION": "a b"}, True, "this is a session over ssh"),
        (1000, {"DISPLAY": ":0"}, False, "this is no terminal"),
        (1000, {}, True, "there is no display"),
    ],
)
def test_open(user, variables, has_terminal, problem, serve, monkeypatch, capsys) -> None:
    """A browser is opened for a user before a display alone, once the page answers, without the key."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: has_terminal)
    for name in os.environ:
        if name.startswith(("SSH_", "DISPLAY", "WAYLAND", "BROWSER")):
            monkeypatch.delenv(name)
    for name, value in {**variables, "VLLM_API_KEY": "the key"}.items():
        monkeypatch.setenv(name, value)
    assert serve("--open") == 0
    said = capsys.readouterr().err
    browsers = serve.started[1:]
    assert len(browsers) == (problem is None)
    for command, environment in browsers:
        assert command[:3] == [sys.executable, "-m", "webbrowser"]
        assert f"The page answers: {command[3]} " in said
        assert "the key" not in [*command, *environment.values()]
    assert problem is None or f"--open: {problem}, so no browser is opened" in said


def test_not_started(serve, monkeypatch, capsys) -> None:
    """Nothing is: for the help, on a port that another program has, and where this package is turned off."""
    assert status_of("serve-page", "--help") == 0
    assert "VLLM_PLUGINS" in capsys.readouterr().out
    with server.socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert status_of("serve-page", "--port", port) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_DIFFUSION_DISABLE", "1")
    assert serve() == 1
    assert "unset it" in capsys.readouterr().err
    assert serve.started == []


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_end(kind: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C ends a server that has served, with status 0; if the command is killed, it ends too."""
    code = (
        "import sys, tempfile; from vllm_diffusion.cli import main, serve_page; "
        f"tempfile.tempdir = {str(tmp_path)!r}; port = '{free_port()}'; "
        f"serve_page.VLLM_SERVE = [*{fake_command('stays')[:-1]!r}, port]; "
        "sys.exit(main.main(['serve-page', '--port', port]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("The page answers" in line for line in iter(process.stderr.readline, ""))
    children = psutil.Process(process.pid).children()
    assert len(children) == 1
    process.send_signal(kind)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (0 if kind is signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
