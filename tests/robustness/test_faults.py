"""A fault gives clients an error or an end, and leaves no process or memory.

pytest -m slow tests/robustness/test_faults.py
"""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.support.engines.server import MODEL, Server, start_server, still_running, wait_for
from tests.support.models.checkpoints import SHIPPED

pytestmark = pytest.mark.engine

# A start and an end of a server on busy cores.
WAIT_SECONDS = 120
PROBE = Path(__file__).resolve().parents[2] / "examples/kubernetes/alive.py"
# One request of the longest kind fills it.
SMALL_CACHE = ("--kv-cache-memory-bytes", str(9 * 1024**2 // 4))
# Before the name of a thread of the engine, in a path of the middleware.
RAISE_IN = "/raise_in/"


@dataclass
class Waiting:
    """A client in the middle of an answer.

    Attributes:
        thread: Which reads it.
        begun: Set once its first event was read.
        ending: What the client saw: ``"end"``, or the error.
    """

    thread: threading.Thread
    begun: threading.Event
    ending: str = ""


def long_request(index: int) -> dict[str, Any]:
    """Return a request that takes many seconds."""
    return {
        "model": MODEL,
        "prompt": f"Count from {index}",
        "max_tokens": 900,
        "seed": index,
        "ignore_eos": True,
        "vllm_xargs": {"diffusion_max_steps": 40, "diffusion_stability_threshold": 40},
    }


def start_client(server: Server, index: int, *, stream: bool) -> Waiting:
    """Request a long answer, one stream in two with frames, and read it in a thread."""

    def read() -> None:
        shown = {"diffusing": True} if stream and index % 4 == 0 else {}
        body = {**long_request(index), "stream": stream, **shown}
        url = f"{server.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, timeout=WAIT_SECONDS) as response:
                for _ in response.iter_lines():
                    waiting.begun.set()
            waiting.ending = "end" if response.status_code == 200 else str(response.status_code)
        except httpx.TransportError as error:
            waiting.ending = repr(error)

    waiting = Waiting(threading.Thread(target=read, daemon=True), threading.Event())
    waiting.thread.start()
    return waiting


def start_clients(server: Server) -> list[Waiting]:
    """Start clients in the middle of streams, and others that wait for a whole answer."""
    clients = [start_client(server, index, stream=index % 2 == 0) for index in range(6)]
    for client in clients[::2]:
        assert client.begun.wait(WAIT_SECONDS), "no stream began"
    return clients


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """Return the files that other processes could map too."""
    paths = {mapped.path for process in processes for mapped in process.memory_maps()}
    return {Path(path) for path in paths if path.startswith("/dev/shm/")}


@contextmanager
def leaves_nothing(server: Server) -> Iterator[None]:
    """Check that the server ends by itself, with its processes, port and shared memory."""
    processes = server.processes()
    shared = shared_memory_of(processes)
    yield
    # Ours to reap; the others have a parent, or get another.
    server.process.wait(WAIT_SECONDS)
    wait_for(lambda: still_running(processes), [], WAIT_SECONDS)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert not [path for path in shared if path.exists()]


def assert_all_end(clients: list[Waiting]) -> list[str]:
    """Check that every client got an error or an end, and return which."""
    for client in clients:
        client.thread.join(WAIT_SECONDS)
        assert client.ending, "a client still waits"
    return [client.ending for client in clients]


@contextmanager
def small_server(tmp_path: Path, *options: str, **variables: str) -> Iterator[Server]:
    """Run a server of its own, short of KV cache."""
    log = tmp_path / "server.log"
    with start_server(SHIPPED, log, *SMALL_CACHE, *options, **variables) as server:
        yield server


async def raise_in_thread(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Have a thread of the engine raise: the path names which; leave other paths to the server.

    A middleware of ``vllm serve``.
    """
    from vllm.v1.engine import EngineCoreRequestType

    if not request.url.path.startswith(RAISE_IN):
        return await call_next(request)
    client = request.app.state.engine_client
    if request.url.path.endswith("input"):
        # No request that the engine could decode.
        await client.engine_core._send_input(EngineCoreRequestType.ADD, ("text",))
    else:
        # A model is nothing that the engine could encode. Its answer never comes.
        asyncio.ensure_future(client.collective_rpc("get_model"))
    return Response()


@pytest.mark.slow
@pytest.mark.parametrize("thread", ["input", "output"])
def test_thread_of_the_engine_raises(thread: str, tmp_path: Path) -> None:
    """An engine whose thread raised ends the server with an error for every client."""
    middleware = f"{__name__}.{raise_in_thread.__name__}"
    root = str(Path(__file__).resolve().parents[2])
    with small_server(tmp_path, "--middleware", middleware, PYTHONPATH=root) as server:
        clients = start_clients(server)
        with leaves_nothing(server):
            httpx.get(f"{server.url}{RAISE_IN}{thread}", timeout=WAIT_SECONDS)
            endings = assert_all_end(clients)
        assert all(ending in ("end", "500") or "Error" in ending for ending in endings), endings


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="one rank"),
        pytest.param(("--tensor-parallel-size", "2"), marks=pytest.mark.slow, id="two ranks"),
    ],
)
def test_terminated(options: tuple[str, ...], tmp_path: Path) -> None:
    """SIGTERM gives each request in flight an error or an end, and a late one a 503.

    Processes are spawned, as ``vllm serve`` does for an accelerator.
    """
    with small_server(tmp_path, *options, VLLM_WORKER_MULTIPROC_METHOD="spawn") as server:
        clients = start_clients(server)
        statuses: list[int] = []
        late = threading.Thread(target=tokenize_until_gone, args=(server, statuses), daemon=True)
        with leaves_nothing(server):
            server.process.send_signal(signal.SIGTERM)
            late.start()
            assert_all_end(clients)
        late.join(WAIT_SECONDS)
        assert set(statuses) - {200} == {503}


def tokenize_until_gone(server: Server, statuses: list[int]) -> None:
    """Send short requests until no server answers, and append their statuses."""
    while True:
        try:
            statuses.append(server.post("/tokenize", {"prompt": "a"}).status_code)
        except httpx.TransportError:
            return


def probe(server: Server, seconds: float) -> int:
    """Return the exit status of the probe that the examples for Kubernetes have."""
    command = [sys.executable, str(PROBE), "--url", server.url, "--seconds", str(seconds)]
    return subprocess.run(command, timeout=WAIT_SECONDS, check=False).returncode


@pytest.mark.slow
def test_engine_that_stands_still(tmp_path: Path) -> None:
    """The probe fails while the engine's process is stopped, and passes before and after.

    ``/health`` notices nothing. A request of a busy server may wait for longer than the probe does.
    """
    with small_server(tmp_path) as server:
        (engine,) = [p for p in server.processes() if "EngineCore" in "".join(p.cmdline())]
        for start in (lambda _: [], start_clients):
            clients = start(server)
            assert probe(server, 60) == 0
            engine.suspend()
            # What it had computed before is counted meanwhile.
            time.sleep(2)
            assert probe(server, 5) == 1
            assert httpx.get(f"{server.url}/health").status_code == 200
            engine.resume()
            assert probe(server, 60) == 0
            assert set(assert_all_end(clients)) <= {"end"}
