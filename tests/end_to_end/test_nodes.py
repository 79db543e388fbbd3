"""Two nodes without Ray, both of them this machine: the server's, and one without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import SHIPPED
from tests.support.seeded_requests import answers_alone, answers_together
from tests.support.server import Server, start_headless, start_server, stop_server
from vllm_diffusion.cli.server import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


@contextmanager
def _two_nodes(options: str, folder: Path) -> Iterator[Server]:
    """A server whose other half is a process of another command."""
    port = str(free_port())
    if "data-parallel" in options:
        both = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port)
        first, second = (), ("--data-parallel-start-rank", "1")
    else:
        both = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
        first, second = ("--node-rank", "0"), ("--node-rank", "1")
    words = (*options.split(), *both)
    with ExitStack() as stack:
        other = start_headless(SHIPPED, folder / "second.log", *words, *second)
        stack.callback(stop_server, other)
        running = start_server(SHIPPED, folder / "first.log", *words, *first)
        stack.callback(stop_server, running)
        assert other.process.poll() is None
        yield running
        assert other.process.poll() is None
        assert "Traceback" not in other.log.read_text(errors="replace")


@pytest.mark.parametrize(
    "options",
    [
        "--tensor-parallel-size 2",
        "--pipeline-parallel-size 2",
        "--pipeline-parallel-size 2 --async-scheduling",
        "--data-parallel-size 2 --data-parallel-size-local 1",
    ],
)
def test_tokens(options: str, server: Server, tmp_path: Path) -> None:
    """Those of one process, alone and together."""
    expected = answers_alone(server)
    with _two_nodes(options, tmp_path) as running:
        assert answers_alone(running) == expected
        assert answers_together(running) == expected
        running.wait_until_idle()
