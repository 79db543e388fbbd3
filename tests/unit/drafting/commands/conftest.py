"""Fake servers for commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import fake_server
from vllm_diffusion.cli import server


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Starts servers that no command starts or stops; returns the address of each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with ExitStack() as stack:

        def start(behaviour: str) -> str:
            command = fake_server.command(behaviour)
            return stack.enter_context(server.Server(command, report=lambda _: None)).url

        yield start
