"""``vllm-diffusion serve-page`` makes a command and an environment, and becomes ``vllm serve``."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from vllm_diffusion.cli import serve_page
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.cli.main import main
from vllm_diffusion.cli.server import VLLM_SERVE

SHIPPED = str(shipped_checkpoint())
LOCAL = ["--host", "127.0.0.1"]


@pytest.fixture
def execve(monkeypatch: pytest.MonkeyPatch):
    """What the process would become: a list of a command and its environment."""
    became: list = []
    monkeypatch.setattr(serve_page.os, "execve", lambda path, *rest: became.append(rest))
    return became


@pytest.mark.parametrize(
    ("arguments", "options", "url"),
    [
        ([], [SHIPPED, *LOCAL], "http://127.0.0.1:8000/diffusion/"),
        (["a/model"], ["a/model", *LOCAL], "http://127.0.0.1:8000/diffusion/"),
        (
            ["--port", "81", "--max-num-seqs", "4"],
            [SHIPPED, "--port", "81", "--max-num-seqs", "4", *LOCAL],
            "http://127.0.0.1:81/diffusion/",
        ),
        (
            ["a/model", "--host=0.0.0.0", "--root-path", "/llm/"],
            ["a/model", "--host=0.0.0.0", "--root-path", "/llm/"],
            "http://localhost:8000/llm/diffusion/",
        ),
        (
            ["m", "--host", "fe80::1", "--ssl-certfile", "c.pem"],
            ["m", "--host", "fe80::1", "--ssl-certfile", "c.pem"],
            "https://[fe80::1]:8000/diffusion/",
        ),
    ],
)
def test_command(arguments, options, url, execve, monkeypatch, capsys) -> None:
    """Options reach vLLM as they are; the shipped checkpoint and this machine where none are named."""
    monkeypatch.setenv("VLLM_PLUGINS", "another,vllm_diffusion")
    main(["serve-page", *arguments])
    ((command, environment),) = execve
    assert command == [*VLLM_SERVE, *options]
    assert environment["VLLM_PLUGINS"] == (
        "another,vllm_diffusion,vllm_diffusion_cpu,vllm_diffusion_metrics,vllm_diffusion_page"
    )
    assert environment["PYTHONSAFEPATH"] == "1"
    said = capsys.readouterr().err
    assert url in said
    assert f"VLLM_PLUGINS={environment['VLLM_PLUGINS']}" in said


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


def test_help(execve, capsys) -> None:
    """Says what it does, and starts nothing."""
    assert main(["serve-page", "--help"]) == 0
    assert "VLLM_PLUGINS" in capsys.readouterr().out
    assert execve == []


def test_disabled(execve, monkeypatch, capsys) -> None:
    """A package that is turned off has no page."""
    monkeypatch.setenv("VLLM_DIFFUSION_DISABLE", "1")
    assert main(["serve-page"]) == 1
    assert "unset it" in capsys.readouterr().err
    assert execve == []
