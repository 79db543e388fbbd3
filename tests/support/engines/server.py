"""``vllm serve`` as a process of its own; the tests over HTTP share one."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import psutil

from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.cli.client import read_metrics, totals
from vllm_diffusion.cli.server import VLLM_SERVE, free_port

MODEL = "tiny"
# Of the shared server: room for the smallest budget of a thought that Anthropic's API knows, 1024.
SHARED_MAX_MODEL_LEN = 1152
# As the README starts the published checkpoints.
PARSERS = (
    "--reasoning-parser",
    "gemma4",
    "--tool-call-parser",
    "gemma4",
    "--enable-auto-tool-choice",
)
# vLLM logs a line for each pass.
LOGS_PASSES = "--enable-logging-iteration-details"
# Longer than a start takes on two busy cores.
START_SECONDS = 600


@dataclass
class Server:
    """A server that answers; it runs while the block of a ``with`` does.

    Attributes:
        url: ``http://127.0.0.1:<port>``.
        checkpoint: Folder of the checkpoint that it serves.
        canvas_length: Its canvas width in tokens, where ``config.json`` calls it so; otherwise 0.
        vocab_size: Number of token ids.
        process: The API process.
        log: What the server printed, a file.
    """

    url: str
    checkpoint: Path
    canvas_length: int
    vocab_size: int
    process: subprocess.Popen[bytes]
    log: Path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        stop_server(self)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300, **options
        )

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """Send a request without a client's own checks."""
        body = {"model": MODEL, **body}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=300)

    def processes(self) -> list[psutil.Process]:
        """Return all of the server's processes, the API process first."""
        api = psutil.Process(self.process.pid)
        return [api, *api.children(recursive=True)]

    def resident_bytes(self) -> int:
        """Return the memory of all its processes, with shared pages counted once for each."""
        return sum(process.memory_info().rss for process in self.processes())

    def metric(self, name: str) -> float:
        """Return a counter or gauge of ``/metrics``, summed over its labels."""
        found = totals(read_metrics(self.url))
        assert name in found, f"/metrics has no {name}"
        return found[name]

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Return once no request runs or waits and no KV block is in use.

        vLLM reports a step to one of several API servers, and the last of them to write a gauge
        wins: an earlier step's value can stay. A further request has gauges written again.

        Raises:
            AssertionError: If that does not happen in time.
        """
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        began = time.monotonic()
        rewritten = began
        while True:
            in_use = {name: self.metric(name) for name in (*gauges, "vllm:kv_cache_usage_perc")}
            if not any(in_use.values()):
                return
            now = time.monotonic()
            assert now < began + seconds, f"after {seconds} s there is still {in_use}"
            if now > rewritten + 10:
                self.assert_alive()
                rewritten = now
            time.sleep(0.2)

    def assert_alive(self) -> None:
        """Check that a small request is answered."""
        response = self.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert response.status_code == 200, response.text
        assert self.process.poll() is None


def start_headless(checkpoint: Path, log: Path, *options: str) -> Server:
    """Start a node without a server: it waits for another one's, and never answers itself."""
    return _spawn(checkpoint, log, 0, *options, "--headless")


def _spawn(checkpoint: Path, log: Path, port: int, *options: str, **variables: str) -> Server:
    # `vllm serve`, as this package's own commands start it, which is there sooner.
    command = [*VLLM_SERVE, str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8"]
    command += ["--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}']
    command += ["--kv-cache-memory-bytes", str(64 * 1024**2), "--enforce-eager"]
    command += ["--enable-prompt-tokens-details", *options]
    # As a user starts it: the settings of the tests' own processes do not apply.
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    # What only the test's own process needs, and what an engine that was configured there has set.
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET", "VLLM_MAX_N_SEQUENCES"):
        environment.pop(name, None)
    environment |= variables
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # A group of its own, so that stopping it reaches every process of it.
            start_new_session=True,
        )
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return Server(
        f"http://127.0.0.1:{port}",
        checkpoint,
        config.get("canvas_length", 0),
        config.get("text_config", config)["vocab_size"],
        process,
        log,
    )


def start_server(checkpoint: Path, log: Path, *options: str, **variables: str) -> Server:
    """Start a text-only ``vllm serve`` on a free port and wait until it answers.

    Args:
        checkpoint: What to serve.
        log: File for what it prints.
        options: Of ``vllm serve``.
        variables: Of its environment.

    Raises:
        RuntimeError: With the end of its log, if it ends or does not answer in time.
    """
    server = _spawn(checkpoint, log, free_port(), *options, **variables)
    deadline = time.monotonic() + START_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        if is_ready(server.url):
            return server
        time.sleep(0.5)
    stop_server(server)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def is_ready(url: str) -> bool:
    """Return true if a server answers at an address, and is healthy."""
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def wait_for(read: Callable[[], object], expected: object, seconds: float = 60) -> None:
    """Wait until ``read`` returns what is expected; fail with its last result if it never does."""
    deadline = time.monotonic() + seconds
    while (found := read()) != expected:
        assert time.monotonic() < deadline, f"after {seconds} s it is still {found}"
        time.sleep(0.1)


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that have not ended; one that has may wait for whoever has adopted it."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def stop_server(server: Server) -> None:
    """End every process of the server."""
    for signal_number, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
        try:
            os.killpg(server.process.pid, signal_number)
        except ProcessLookupError:
            return
        try:
            server.process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def shared_server(folder: Path) -> Iterator[Server]:
    """Run a server on the shipped checkpoint, which every test must leave idle and alive."""
    options = (*PARSERS, "--max-model-len", str(SHARED_MAX_MODEL_LEN), LOGS_PASSES)
    # Without it vLLM stores no responses.
    stored = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with start_server(SHIPPED, folder / "server.log", *options, **stored) as running:
        yield running
