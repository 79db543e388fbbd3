"""Several engines and API servers give one server's tokens, count apart, and fail together."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.pairs.answers import events
from tests.support.engines.seeded_requests import (
    ALL,
    Tokens,
    answers_alone,
    answers_together,
    check_answers,
    check_tokens,
    seeded_request,
)
from tests.support.engines.server import Server, is_ready, start_server, stop_server, wait_for
from tests.support.engines.streams import OrderedStream
from tests.support.families.cases import CASES
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.quantized import quantized_checkpoint
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli.server import free_port

pytestmark = pytest.mark.engine

TWO_ENGINES = ("--data-parallel-size", "2", "--distributed-executor-backend", "uni")
# Enough connections that the system hands some to each API server.
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def expected(server: Server) -> list[Tokens]:
    """Return the answers of one engine."""
    return answers_alone(server)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run two engines after two API servers."""
    log = tmp_path_factory.mktemp("replicas") / "server.log"
    with start_server(SHIPPED, log, *TWO_ENGINES, "--api-server-count", "2") as running:
        yield running


def test_tokens(replicas: Server, expected: list[Tokens]) -> None:
    """Answers are the same alone, next to dummy batches, and in batches of both engines."""
    check_tokens(replicas, expected)


def test_no_seed(replicas: Server) -> None:
    """Two engines answer equal requests without a seed differently."""
    # One step leaves in an answer what was drawn.
    steps = {"vllm_xargs": {"diffusion_max_steps": 1}}
    length = {"max_tokens": 90, "ignore_eos": True}
    body = {"prompt": "Tell a story:", "return_token_ids": True} | length | steps
    answers = [
        replicas.post("/v1/completions", body, **{"X-data-parallel-rank": str(i % 2)}).json()
        for i in range(8)
    ]
    answers = [answer["choices"][0]["token_ids"] for answer in answers]
    assert answers[0::2] != answers[1::2]


@pytest.mark.parametrize("engine", "01")
def test_chosen_engine(engine: str, replicas: Server) -> None:
    """A header chooses the engine for any API server, and metrics name the engine."""
    before = {each: _canvases(replicas, each) for each in "01"}
    body = {"prompt": "Red", "max_tokens": 70, "ignore_eos": True}
    rank = {"X-data-parallel-rank": engine}
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        asked = [
            pool.submit(replicas.post, "/v1/completions", body, **rank) for _ in range(NUM_STREAMS)
        ]
    assert [response.result().status_code for response in asked] == [200] * NUM_STREAMS
    # 70 tokens are three canvases of the shipped checkpoint.
    expected = {each: before[each] + 3 * NUM_STREAMS * (each == engine) for each in "01"}
    wait_for(lambda: {each: _canvases(replicas, each) for each in "01"}, expected)
    steps = replicas.metric("vllm_diffusion:denoise_steps_per_canvas_count")
    assert steps == replicas.metric("vllm_diffusion:canvases_total")


def _canvases(server: Server, engine: str) -> float:
    name = f'vllm_diffusion:canvases_total{{engine="{engine}"'
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_frames(replicas: Server) -> None:
    """Each stream has its own frames, and the last one of a canvas is what is committed."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        asked = [shown(seed, max_tokens=70) for seed in range(NUM_STREAMS)]
        streams = pool.map(lambda body: OrderedStream(replicas, "/v1/completions", body), asked)
        assert [stream.frames[0][0]["step"] for stream in streams] == [1] * NUM_STREAMS


def shown(seed: int, max_tokens: int) -> dict[str, Any]:
    """Return the body of a streamed completion that shows its canvas."""
    length = {"max_tokens": max_tokens, "ignore_eos": True}
    return {"prompt": "Red", "seed": seed, "stream": True, "diffusing": True} | length


def test_dead_engine(replicas: Server) -> None:
    """A dead engine ends the server, as in vLLM, with an error for every client."""
    processes = psutil.Process(replicas.process.pid).children(recursive=True)
    (engine,) = [p for p in processes if "EngineCore_DP1" in " ".join(p.cmdline())]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        waiting = [
            pool.submit(replicas.post, "/v1/completions", shown(seed, max_tokens=900))
            for seed in range(NUM_STREAMS)
        ]
        wait_for(lambda: replicas.metric("vllm:num_requests_running"), NUM_STREAMS)
        engine.kill()
        for stream in waiting:
            # The server may be gone before the sentence is said.
            with suppress(httpx.TransportError):
                assert "error" in events(stream.result(timeout=60).text)[-1]
    assert replicas.process.wait(60) != 0
    _, left = psutil.wait_procs(processes, timeout=30)
    assert not left


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "options",
    [
        "--data-parallel-size 2 --async-scheduling",
        "--data-parallel-size 2 --enable-expert-parallel",
        "--data-parallel-size 2 --enable-expert-parallel --async-scheduling",
        "--tensor-parallel-size 2 --enable-expert-parallel",
        "--tensor-parallel-size 2 --enable-expert-parallel --async-scheduling",
        "--tensor-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel",
        # How often engines ask one another whether all are done, and over which of their groups.
        "--data-parallel-size 2 --dp-sync-interval 1 --disable-nccl-for-dp-synchronization",
        "--data-parallel-size 2 --async-scheduling --no-disable-nccl-for-dp-synchronization",
    ],
)
def test_tokens_of_other_layouts(options: str, expected: list[Tokens], tmp_path: Path) -> None:
    """Other layouts give the same tokens, alone and together, and log no trace."""
    check_answers(SHIPPED, tmp_path, options.split(), expected)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tokens_of_a_dense_model(tmp_path: Path) -> None:
    """Independent engines of a dense model give the same tokens."""
    sdar = shipped_checkpoint("sdar")
    with start_server(sdar, tmp_path / "one.log") as one:
        expected = answers_alone(one)
    check_answers(sdar, tmp_path, [*TWO_ENGINES, "--api-server-count", "2"], expected)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in ("sdar-moe", "llada2.2", "fp8-dynamic", "nvfp4")
        for layout in ("--data-parallel-size", "--tensor-parallel-size")
        # Ranks add up in another order and scale their parts of FP8 rows, which rounds activations
        # to other numbers (docs/operate/scaling.md).
        if layout == "--data-parallel-size" or name not in ("fp8-dynamic", "nvfp4")
    ],
)
def test_tokens_of_experts(name: str, layout: str, tmp_path: Path) -> None:
    """Engines or ranks with half of the experts of another family, or of quantized ones, give the
    tokens of one engine to the requests that its family takes.
    """
    options: tuple[str, ...] = ()
    if name in CASES:
        checkpoint = CASES[name].make().save(tmp_path / name)
        options = ("--max-model-len", "256")
    else:
        checkpoint = quantized_checkpoint(tmp_path / name, name)
    with start_server(checkpoint, tmp_path / "one.log", *options) as running:
        taken = [i for i in ALL if running.post(*seeded_request(i)).status_code == 200]
        assert len(taken) >= 13
        expected = answers_alone(running, taken)
    options = (*options, layout, "2", "--enable-expert-parallel")
    check_answers(checkpoint, tmp_path, options, expected, taken)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_port_for_each_engine(expected: list[Tokens], tmp_path: Path) -> None:
    """vLLM's supervisor starts a server for each engine, and ends all of them with one."""
    supervisor = free_port()
    options = (
        f"--data-parallel-multi-port-external-lb --data-parallel-supervisor-port {supervisor} "
        "--data-parallel-size 2 --data-parallel-size-local 2 "
        f"--data-parallel-address 127.0.0.1 --data-parallel-rpc-port {free_port()}"
    )
    with start_server(SHIPPED, tmp_path / "server.log", *options.split()) as first:
        address, _, port = first.url.rpartition(":")
        servers = [first, replace(first, url=f"{address}:{int(port) + 1}")]
        wait_for(lambda: is_ready(f"{address}:{supervisor}"), True)
        # One of them is idle meanwhile, and runs dummy batches.
        assert answers_alone(servers[1]) == expected
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(answers_together, servers)) == [expected, expected]
        for engine, running in enumerate(servers):
            running.wait_until_idle()
            assert _canvases(running, str(engine)) > 0
        processes = psutil.Process(first.process.pid).children(recursive=True)
        (engine_1,) = [p for p in processes if "EngineCore_DP1" in " ".join(p.cmdline())]
        engine_1.kill()
        first.process.wait(120)
        _, left = psutil.wait_procs(processes, timeout=30)
        assert not left


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("--data-parallel-size 2 --data-parallel-external-lb --data-parallel-rank", "01"),
        (
            "--data-parallel-size 4 --data-parallel-size-local 2 --data-parallel-hybrid-lb "
            "--data-parallel-start-rank",
            "02",
        ),
    ],
    ids=["external", "hybrid"],
)
def test_several_servers(layout: str, ranks: str, expected: list[Tokens], tmp_path: Path) -> None:
    """Servers on ports of their own, whose engines keep in step, give the same tokens."""
    shared = ["--data-parallel-rpc-port", str(free_port()), "--data-parallel-address", "127.0.0.1"]
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        starting = [
            pool.submit(
                start_server, SHIPPED, tmp_path / f"{rank}.log", *shared, *layout.split(), rank
            )
            for rank in ranks
        ]
        servers = [future.result() for future in starting]
        for running in servers:
            stack.callback(stop_server, running)
        # One of them is idle meanwhile, and runs dummy batches.
        assert answers_alone(servers[1]) == expected
        both = list(pool.map(answers_together, servers))
        assert both == [expected, expected]
        # Without one of them the others cannot go on, and say so.
        stop_server(servers[0])
        with suppress(httpx.TransportError):
            assert servers[1].post("/v1/completions", {"prompt": "a"}).status_code >= 500
        # With one API process vLLM then exits with 0.
        servers[1].process.wait(60)
