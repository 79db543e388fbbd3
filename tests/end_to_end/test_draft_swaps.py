"""``vllm serve`` replaces its draft while it answers."""

import itertools
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines.commands import run
from tests.support.engines.server import Server
from tests.support.engines.tiny_pair import (
    SWAPS,
    SWAPS_PLUGINS,
    dflash,
    greedy_answer,
    greedy_answers,
    save_random_draft,
    serving,
)
from vllm_diffusion.checkpoints import shipped_draft

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
_ACCEPTED = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)".*\} (\S+)$', re.M
)


@pytest.fixture(scope="module")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_draft(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return greedy_answers()


def ask(server: Server, question: str) -> list[int]:
    return greedy_answer(server, question, **HEADERS)


def counted(server: Server, expected: dict[str, list[int]]) -> list[float]:
    """Count verifications, and accepted drafts by position, of the same requests one by one."""

    def counters() -> list[float]:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        positions = sorted((int(place), float(value)) for place, value in _ACCEPTED.findall(text))
        assert len(positions) == 7
        verified = server.metric("vllm:spec_decode_num_drafts_total")
        return [verified, *(value for _, value in positions)]

    before = counters()
    for question, tokens in expected.items():
        assert ask(server, question) == tokens
    server.wait_until_idle()
    return [now - then for now, then in zip(counters(), before, strict=True)]


def swapping(
    folder: Path, draft: Path, *options: str, drafting: dict[str, Any] | None = None
) -> AbstractContextManager[Server]:
    """Start a server with an API key whose draft can be replaced."""
    variables = {"VLLM_PLUGINS": SWAPS_PLUGINS, "VLLM_API_KEY": KEY}
    return serving(folder, dflash(draft), drafting, (*SWAPS, *options), **variables)


def swap_under_load(
    server: Server, expected: dict[str, list[int]], draft: Path
) -> subprocess.CompletedProcess[str]:
    """Swap the draft while four clients send requests without pause."""
    command = [sys.executable, "-m", "vllm_diffusion.cli.main", "swap-draft", "--url", server.url]
    command += ["--api-key", KEY, draft]
    is_done = threading.Event()

    def keep_asking(first: int) -> None:
        for question in itertools.islice(itertools.cycle(expected), first, None):
            assert ask(server, question) == expected[question]
            if is_done.is_set():
                return

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(keep_asking, first) for first in range(4)]
        try:
            done = run(*command, timeout=300)
        finally:
            is_done.set()
        for client in clients:
            client.result()
    server.wait_until_idle()
    return done


ORDERS: dict[str, tuple[str, ...]] = {
    "asynchronous": ("--async-scheduling",),
    "synchronous": ("--no-async-scheduling",),
    "two ranks": ("--tensor-parallel-size", "2"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_swaps(
    order: str, random_draft: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Requests in flight during a swap of drafts keep their answers, and afterwards the counters
    are those of the draft that is served.
    """
    with swapping(tmp_path, shipped_draft(), *ORDERS[order]) as server:
        trained = counted(server, expected)
        for _ in range(2):
            assert counted(server, expected) == trained
        # More than five tokens a verification.
        assert sum(trained[1:]) > 4 * trained[0]
        done = swap_under_load(server, expected, random_draft)
        assert str(random_draft) in done.stdout.splitlines()[0]
        worse = counted(server, expected)
        assert sum(worse[1:]) < trained[0] < worse[0]
        # By its path the old one comes back.
        done = swap_under_load(server, expected, shipped_draft())
        assert counted(server, expected) == trained

        assert "Traceback" not in done.stderr + server.log.read_text(errors="replace")
        assert httpx.get(f"{server.url}/v1/draft").status_code == 401
