"""Two servers and the proxy of the examples: one prefills, the other denoises, by NIXL between them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import SHIPPED
from tests.support.seeded_requests import Tokens, answers_alone, answers_together
from tests.support.server import MODEL, PARSERS, Server, start_server, stop_server
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.cli.server import free_port

pytest.importorskip("nixl", reason="needs the package nixl")

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "red green blue " * 9
NUM_PROMPT_TOKENS = 135
SDAR = shipped_checkpoint("sdar")


@dataclass
class Pair:
    """The servers, and the first one's address with both behind it.

    Attributes:
        prefill: Of prompts.
        denoise: Of answers.
        both: What a client talks to.
        proxy: Its process.
        unit: Tokens that the denoising server computes of a prompt which it loads whole.
        on_failure: What it does with a prompt that does not come.
    """

    prefill: Server
    denoise: Server
    both: Server
    proxy: subprocess.Popen[bytes]
    unit: int
    on_failure: str


def start(checkpoint: Path, folder: Path, role: str, on_failure: str, *options: str) -> Server:
    transfer = {"kv_connector": "NixlConnector", "kv_role": role}
    transfer["kv_load_failure_policy"] = on_failure
    if checkpoint == SHIPPED:
        options = (*options, *PARSERS, "--language-model-only")
    return start_server(
        checkpoint,
        folder / f"{role}.log",
        *("--kv-transfer-config", json.dumps(transfer), *options),
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((SHIPPED, 1, "recompute", "--no-async-scheduling"), id="synchronous"),
        pytest.param((SHIPPED, 1, "fail", "--async-scheduling"), id="asynchronous"),
        pytest.param((SDAR, 8, "recompute", "--no-async-scheduling"), id="sdar-synchronous"),
        pytest.param((SDAR, 8, "fail", "--async-scheduling"), id="sdar-asynchronous"),
    ],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    checkpoint, unit, on_failure, order = request.param
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starting = [
            pool.submit(start, checkpoint, folder, role, on_failure, order)
            for role in ("kv_producer", "kv_consumer")
        ]
        servers = [future.result() for future in starting]
        for server in servers:
            stack.callback(stop_server, server)
        port = free_port()
        command = [
            sys.executable,
            str(ROOT / "examples/disaggregated/proxy.py"),
            "--port",
            str(port),
        ]
        command += ["--prefill", servers[0].url, "--denoise", servers[1].url]
        proxy = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        stack.callback(proxy.wait)
        stack.callback(proxy.terminate)
        both = replace(servers[1], url=f"http://127.0.0.1:{port}")
        wait_for(both)
        yield Pair(*servers, both, proxy, unit, on_failure)


def wait_for(server: Server) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture(scope="module")
def expected(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[Tokens]:
    """What one server answers."""
    options = PARSERS if pair.denoise.checkpoint == SHIPPED else ()
    with start_server(
        pair.denoise.checkpoint, tmp_path_factory.mktemp("plain") / "server.log", *options
    ) as plain:
        return answers_alone(plain)


def count(server: Server, name: str) -> float:
    """A counter, which is not there before it counts."""
    try:
        return server.metric(f"vllm_diffusion:{name}_total")
    except AssertionError:
        return 0.0


def test_tokens(pair: Pair, expected: list[Tokens]) -> None:
    """One server's, alone and in batches; no canvas is denoised where prompts are prefilled."""
    assert answers_alone(pair.both) == expected
    assert answers_together(pair.both) == expected
    assert count(pair.prefill, "denoise_steps") == 0
    assert count(pair.prefill, "canvases") == 0
    for server in (pair.prefill, pair.denoise):
        server.wait_until_idle()
        assert "Traceback" not in server.log.read_text(errors="replace")


def test_rows(pair: Pair) -> None:
    """A streamed chat, by OpenAI's client: each prompt is computed once, all but its end elsewhere."""
    rows = [count(server, "encode_rows") for server in (pair.prefill, pair.denoise)]
    stream = pair.both.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT + "?"}],
        max_tokens=20,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    chunks = list(stream)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 20
    prefilled, computed = (
        count(server, "encode_rows") - before
        for server, before in zip((pair.prefill, pair.denoise), rows, strict=True)
    )
    assert NUM_PROMPT_TOKENS < usage.prompt_tokens - pair.unit < prefilled <= usage.prompt_tokens
    # Of canvases that the answer goes on behind, and of the prompt at most its last unit.
    canvas = pair.denoise.canvas_length or pair.unit
    assert computed <= pair.unit + -(-20 // canvas) * canvas


def ask(server: Server, **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "seed": 1, **fields})


def test_bad_parameters(pair: Pair) -> None:
    """A 400 that names the field, and nobody is harmed."""
    params = ask(pair.prefill, kv_transfer_params={"do_remote_decode": True}).json()[
        "kv_transfer_params"
    ]
    for changes, word in (
        ({"remote_port": None}, "kv_transfer_params.remote_port"),
        ({"remote_block_ids": "1"}, "kv_transfer_params.remote_block_ids"),
        (
            {"remote_block_ids": params["remote_block_ids"] * 3},
            "kv_transfer_params.remote_block_ids",
        ),
        ({"remote_num_tokens": 3}, "kv_transfer_params.remote_num_tokens"),
    ):
        response = ask(pair.denoise, kv_transfer_params=params | changes)
        assert response.status_code == 400, response.text
        assert word in response.text
    # Greedy, vLLM refuses two answers itself.
    response = ask(pair.denoise, kv_transfer_params=params, n=2, temperature=1.0)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    # Another prompt than was prefilled.
    response = ask(pair.denoise, kv_transfer_params=params, prompt="red " * 90)
    assert response.status_code == 400
    assert ask(pair.denoise, kv_transfer_params=params).status_code == 200


def test_prefilling_server_gone(pair: Pair, expected: list[Tokens]) -> None:
    """What it prefilled is prefilled again, or refused; the proxy goes on with the other one alone."""
    prompts = ("green blue red " * 9, "blue red green " * 9)
    known, unknown = (
        ask(pair.prefill, prompt=prompt, kv_transfer_params={"do_remote_decode": True}).json()[
            "kv_transfer_params"
        ]
        for prompt in prompts
    )
    unknown |= {"remote_engine_id": "another", "remote_port": free_port()}
    stop_server(pair.prefill)
    for prompt, params in zip(prompts, (known, unknown), strict=True):
        own = {"prompt": prompt, "return_token_ids": True}
        response = ask(pair.denoise, kv_transfer_params=params, **own)
        if pair.on_failure == "recompute":
            alone = ask(pair.denoise, **own)
            assert (
                response.json()["choices"][0]["token_ids"]
                == alone.json()["choices"][0]["token_ids"]
            )
        else:
            assert response.status_code == 500, response.text
            assert "error" in response.json()
    assert answers_together(pair.both) == expected
    pair.denoise.wait_until_idle()
    pair.denoise.assert_alive()
