"""A server with a draft and a recording over HTTP: the recording's limit, and a killed server."""

import itertools
import os
import shutil
import signal
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines.server import Server
from tests.support.engines.tiny_pair import (
    SWAPS,
    SWAPS_PLUGINS,
    dflash,
    greedy_answer,
    greedy_answers,
    serving,
)
from vllm_diffusion.checkpoints import shipped_draft
from vllm_diffusion.drafting.recording import read_recording

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

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
