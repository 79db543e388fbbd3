"""``vllm-diffusion serve-page`` with a few lines of HTTP server where vLLM would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import psutil
import pytest

from tests.support.command_server import command as fake_command
from tests.support.commands import status_of
from vllm_diffusion.cli import checkpoint, serve_page, server
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.cli.server import Server, free_port
from vllm_diffusion.cli.values import UsageError

SHIPPED = str(shipped_checkpoint())
LOCAL = ["--host", "127.0.0.1"]
NAMED = ["--served-model-name", "tiny"]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command with a fake server; what its process was started with is its attribute."""
    started: list[tuple[list[str], dict[str, str]]] = []
    begin = subprocess.Popen

    def popen(command, *, env, **options):
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


def address_in(text: str) -> str:
    """The address of the page that a command printed."""
    return text.partition("The page will be at ")[2].partition("\n")[0]


@pytest.mark.parametrize(
    ("arguments", "options", "page"),
    [
        ([], [SHIPPED, *NAMED, *LOCAL], "http://127.0.0.1:8000/diffusion/"),
        (["a/model"], ["a/model", *LOCAL], "http://127.0.0.1:8000/diffusion/"),
        (
            ["--port", "81", "--max-num-seqs", "4", "--open"],
            [SHIPPED, "--port", "81", "--max-num-seqs", "4", *NAMED, *LOCAL],
            "http://127.0.0.1:81/diffusion/",
        ),
        (
            ["a/model", "--verbose", "--host=0.0.0.0", "--root_path", "/llm/"],
            ["a/model", "--host=0.0.0.0", "--root_path", "/llm/"],
            "http://localhost:8000/llm/diffusion/",
        ),
        (
            ["m", "--host", "fe80::1", "--ssl-certfile", __file__],
            ["m", "--host", "fe80::1", "--ssl-certfile", __file__],
            "https://[fe80::1]:8000/diffusion/",
        ),
    ],
)
def test_plan(arguments: list[str], options: list[str], page: str) -> None:
    """Options reach vLLM as they are; the shipped checkpoint and this machine where none are named."""
    plan = serve_page.plan_of(arguments)
    assert list(plan.options) == options
    assert plan.page == page
    assert plan.opens == ("--open" in arguments)
    assert plan.is_verbose == ("--verbose" in arguments)
    assert serve_page.plan_of(["m", "--host", "::"]).listening.url == "http://127.0.0.1:8000"


def test_name_of_the_model(tmp_path: Path) -> None:
    """A folder's name is the model's; a name of the user's, and a file that may hold one, come first."""
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert serve_page.plan_of([str(folder)]).options[1:] == (
        "--served-model-name",
        "a-model",
        *LOCAL,
    )
    for named in (["--served-model-name", "mine"], ["--served_model_name=mine"], ["--config", "x"]):
        assert serve_page.plan_of([str(folder), *named]).options[1:] == (*named, *LOCAL)


def test_address_twice(serve, tmp_path: Path, monkeypatch, capsys) -> None:
    """The address is printed at the start and when it answers, the server's own lines are not."""
    monkeypatch.setenv("VLLM_PLUGINS", "another,vllm_diffusion")
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    assert serve("a/model") == 0
    ((command, environment),) = serve.started
    assert command[:5] == [*server.VLLM_SERVE, "a/model"]
    assert not any("key" in word for word in command)
    assert environment["VLLM_PLUGINS"] == (
        "another,vllm_diffusion,vllm_diffusion_cpu,vllm_diffusion_metrics,vllm_diffusion_page"
    )
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["VLLM_API_KEY"] == "the key"
    said = capsys.readouterr().err
    assert f"VLLM_PLUGINS={environment['VLLM_PLUGINS']}" in said
    assert said.count(address_in(said)) == 2
    assert f"The page answers: {address_in(said)}" in said
    assert "a line of the server's" not in said
    assert not list(tmp_path.glob("*.log"))


def test_no_key(serve, monkeypatch, capsys) -> None:
    """A user who sets no key gets none."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert serve() == 0
    assert "VLLM_API_KEY" not in serve.started[0][1]


def test_verbose(serve, capsys) -> None:
    """All lines of the server, each once."""
    assert serve("--verbose") == 0
    said = capsys.readouterr().err
    assert said.count("a line of the server's") == 1
    assert said.count("the last line") == 1


@pytest.mark.parametrize(("behaviour", "status"), [("dies", 3), ("dies later", 4)])
def test_server_fails(behaviour: str, status: int, serve, tmp_path: Path, capsys) -> None:
    """The end of its log is printed, whenever it ends; the whole log stays."""
    serve.behaviour = behaviour
    assert serve() == 1
    said = capsys.readouterr().err
    assert "a line of the server's" in said
    assert f"stopped with exit status {status}" in said
    (log,) = tmp_path.glob("*.log")
    assert str(log) in said


def test_log_is_bounded(monkeypatch) -> None:
    """What is served for weeks keeps the end of its log."""
    monkeypatch.setattr(server, "_MAX_LOG_BYTES", 8)
    monkeypatch.setattr(server, "_KEPT_LOG_BYTES", 5)
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.05)
    with Server(fake_command("ends"), report=print, timeout=60.0) as running:
        running.wait()
        # Cut before the last line came, or behind it too.
        log = running.log_end()
        assert "a line of the" not in log
        assert log.endswith("line\n")


@pytest.mark.parametrize(
    ("user", "variables", "has_terminal", "problem"),
    [
        (1000, {"DISPLAY": ":0"}, True, None),
        (1000, {"WAYLAND_DISPLAY": "wayland-0"}, True, None),
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
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert serve("--open") == 0
    said = capsys.readouterr().err
    _, *browsers = serve.started
    if problem is not None:
        assert not browsers
        assert f"--open: {problem}, so no browser is opened" in said
        return
    ((command, environment),) = browsers
    assert command == [sys.executable, "-m", "webbrowser", address_in(said)]
    assert "the key" not in [*command, *environment.values()]


def test_port_is_taken(serve, capsys) -> None:
    """A port that another program has is refused before anything is started."""
    with server.socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert status_of("serve-page", "--port", port) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
    assert serve.started == []


@pytest.mark.parametrize("option", ["--headless", "--uds=/a/socket", "--grpc"])
def test_no_port(option: str) -> None:
    """A server that no browser reaches has no page."""
    with pytest.raises(UsageError, match="a browser needs a port"):
        serve_page.plan_of(["m", option])


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
    deadline = time.monotonic() + 60
    while "The page answers" not in process.stderr.readline():
        assert time.monotonic() < deadline
    children = psutil.Process(process.pid).children()
    assert len(children) == 1
    process.send_signal(kind)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (0 if kind is signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_allowed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset, all of them were allowed but those that add paths; set to nothing, none."""
    installed = EntryPoints(
        EntryPoint(name, "module:function", group)
        for name, group in (
            ("a_platform", "vllm.platform_plugins"),
            ("vllm_diffusion", "vllm.general_plugins"),
            ("a_route", "vllm.endpoint_plugins"),
            ("a_script", "console_scripts"),
        )
    )
    monkeypatch.setattr(serve_page, "entry_points", lambda: installed)
    ours = [
        "vllm_diffusion",
        "vllm_diffusion_cpu",
        "vllm_diffusion_metrics",
        "vllm_diffusion_page",
    ]
    assert serve_page.allowed_plugins({}) == ["a_platform", *ours]
    assert serve_page.allowed_plugins({"VLLM_PLUGINS": ""}) == ours
    assert serve_page.allowed_plugins({"VLLM_PLUGINS": "a_route"}) == ["a_route", *ours]


def test_help(serve, capsys) -> None:
    """Says what it does, and starts nothing."""
    assert status_of("serve-page", "--help") == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("VLLM_PLUGINS", "--open", "--verbose"))
    assert serve.started == []


def test_disabled(serve, monkeypatch, capsys) -> None:
    """A package that is turned off has no page."""
    monkeypatch.setenv("VLLM_DIFFUSION_DISABLE", "1")
    assert serve() == 1
    assert "unset it" in capsys.readouterr().err
    assert serve.started == []
