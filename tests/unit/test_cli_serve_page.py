"""Tests of ``vllm-diffusion serve-page`` with a fake server instead of vLLM."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests.support.doubles.fake_server import command as fake_command
from tests.support.engines.commands import status_of
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli import checkpoint, serve_page, server
from vllm_diffusion.cli.server import free_port

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
    # The test's process keeps its own signal handlers.
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())
    assert status_of("serve-page", "--help") == 0
    assert "VLLM_PLUGINS" in capsys.readouterr().out
    with server.socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert status_of("serve-page", "--port", port) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_DIFFUSION_DISABLE", "1")
    assert status_of("serve-page") == 1
    assert "unset it" in capsys.readouterr().err


def test_server_dies(tmp_path: Path, monkeypatch, capsys) -> None:
    """A server that dies after it served leaves its last lines and no trace."""
    port = str(free_port())
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(serve_page, "VLLM_SERVE", fake_command("dies later", port))
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
        f"serve_page.VLLM_SERVE = [*{fake_command('stays')[:-1]!r}, port]; "
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
