"""``vllm serve`` replaces its draft while it answers, and records what the next one learns from."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
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
from vllm_diffusion.checkpoints import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.recording import read_recording

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


MIB = 2**20


def recording_to(folder: Path, recording: Path) -> AbstractContextManager[Server]:
    drafting = {"record": {"folder": str(recording), "max_mib": 1}}
    return serving(folder, dflash(), drafting, SWAPS, VLLM_PLUGINS=SWAPS_PLUGINS)


def complete(server: Server, prompt: list[int], **extra: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "vllm_xargs": extra}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text


def bytes_in(recording: Path) -> int:
    """Add up the sizes of a recording's files; the server may delete the oldest one meanwhile."""
    total = 0
    for file in recording.glob("*.jsonl"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def test_recording_and_sudden_end(tmp_path: Path) -> None:
    """A recording leaves out requests that opt out, never exceeds its limit, and stays readable
    after the server is killed; the next server serves the draft of its own options and goes on
    recording.
    """
    recording, expected = tmp_path / "recording", greedy_answers()
    with recording_to(tmp_path, recording) as server:
        for number in range(8):
            complete(server, [9, 9, number], record=False)
        sizes = []
        # 320 lines of some 4 KiB.
        for number in range(320):
            complete(server, [100 + number % 100] * 990 + [number // 100, number % 100, 8])
            sizes.append(bytes_in(recording))
        assert max(sizes) <= MIB
        # Bytes went, an eighth of the ring at a time.
        assert any(now < then for then, now in itertools.pairwise(sizes))

        again = tmp_path / "again"
        shutil.copytree(shipped_draft(), again)
        body = {"model": str(again)}
        swapped = httpx.post(f"{server.url}/v1/draft", json=body, timeout=60)
        assert swapped.json()["model"] == str(again)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(30)
    exchanges = read_recording(recording).exchanges
    prompts = [list(each.prompt_token_ids) for each in exchanges]
    assert not [prompt for prompt in prompts if prompt[:2] == [9, 9]]
    # The newest are there, in order, and the oldest are not.
    numbers = [prompt[-3] * 100 + prompt[-2] for prompt in prompts]
    assert numbers == list(range(320 - len(numbers), 320))
    assert 200 < len(numbers) < 320
    # The recording goes on where it was, with the draft that the next server is started with.
    with recording_to(tmp_path, recording) as server:
        served = httpx.get(f"{server.url}/v1/draft", timeout=60).json()
        assert served == {"model": str(shipped_draft())}
        assert {question: greedy_answer(server, question) for question in expected} == expected
    assert len(read_recording(recording).exchanges) > len(expected)


WORDS = ("cat", "table", "horse", "window", "river", "stone", "apple", "cloud", "garden", "paper")
QUESTIONS = [
    f"Count from {first} to {first + length}." for first in range(30) for length in (7, 12)
]
QUESTIONS += [f"Reverse: {one} {other}" for one, other in itertools.permutations(WORDS, 2)]


def test_random_draft(tmp_path: Path) -> None:
    """``calibrate online`` trains a better draft on recorded traffic and swaps it in, and its work
    is halted while the server answers requests.
    """
    recording = tmp_path / "recording"
    drafting = {"record": {"folder": str(recording)}}
    with swapping(tmp_path, save_random_draft(tmp_path / "random"), drafting=drafting) as server:
        command = [sys.executable, "-m", "vllm_diffusion.cli.main", "calibrate", "online"]
        command += ["--url", server.url, "--api-key", KEY, "--recording", str(recording)]
        command += ["--target", str(shipped_checkpoint("qwen3"))]
        command += ["--drafts", str(tmp_path / "drafts")]
        assert "holds no exchange" in run(*command, status=2).stderr

        expected = {question: ask(server, question) for question in QUESTIONS}
        command += ["--exchanges", "100", "--minutes", "5", "--max-model-len", "512"]
        printed, said = tmp_path / "printed", tmp_path / "said"
        with printed.open("w") as output, said.open("w") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors)

        def wait_until(is_so: Callable[[], object]) -> None:
            """Wait; fail with the command's output if it ends, or if its round ends without
            a swap.
            """
            for _ in range(1000):
                if is_so():
                    return
                assert process.poll() is None, said.read_text()
                assert "served on" not in said.read_text(), said.read_text()
                time.sleep(0.5)
            pytest.fail(said.read_text())

        try:
            wait_until(lambda: [*(tmp_path / "drafts").rglob("*.safetensors")])
            # The extraction has begun, and yields; so does the training.
            for question in QUESTIONS[:12]:
                assert ask(server, question) == expected[question]
            wait_until(printed.read_text)
            for question in QUESTIONS[:12]:
                assert ask(server, question) == expected[question]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    lines = said.read_text().splitlines()
    assert any("On held-out answers" in line for line in lines), lines
    (new,) = (tmp_path / "drafts").iterdir()
    assert printed.read_text() == f"{new} is served.\n", lines
    assert "training: halted, the server has work" in lines
    assert "training: goes on" in lines
    assert (new / "model.safetensors").is_file()
