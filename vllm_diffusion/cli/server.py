"""A ``vllm serve`` of our own in a child process: started, waited for, asked, stopped."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

HOST = "127.0.0.1"
# Seconds between two looks at a server that is starting, and between two lines about it while it
# does the same thing.
_POLL_SECONDS = 0.25
_REPORT_SECONDS = 10.0
# What each signal is given before the next, harder one.
_STOP_SECONDS = ((signal.SIGINT, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
# Closing the terminal or ending this process ends the server too.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# What the server does after it has logged the line that holds the text on the left.
_STAGES = (
    ("Application startup complete", "answering its first health check"),
    ("init engine (profile", "opening its HTTP port"),
    ("Loading weights took", "warming up"),
    ("Initializing a V1 LLM engine", "building the model"),
    ("Resolved architecture", "starting the engine's process"),
    ("", "importing vLLM"),
)
_LOG_TAIL_LINES = 25
# A folder named vllm where the user happens to be is not imported in vLLM's place.
SERVER_ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
# The command that options follow: `vllm serve`, as this Python has it.
VLLM_SERVE = (sys.executable, "-m", "vllm_diffusion.cli.vllm_command", "serve")
# Requests to the server must not go through a proxy of the environment.
_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(Exception):
    """The server did not start, or stopped. The message is for the user."""


class Server:
    """A server on a free port of this machine, with a random key.

    Use as a context manager: the block runs when the server is ready, and the server and all its
    processes are gone when the block is left, however it is left.

    Attributes:
        url: ``http://127.0.0.1:<port>``.
        api_key: What it asks of its clients.
        log_path: Everything the server printed. Kept only where it can explain an error.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        report: Callable[[str], None],
        timeout: float,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            command: What to run, ``{port}`` standing for the port.
            report: Called with a line about progress every few seconds.
            timeout: Seconds that the server may take until it is ready.
            environment: Variables beside those of this process.
        """
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        # In the environment, not among the arguments, which every user of the machine can read.
        self.api_key = secrets.token_urlsafe(32)
        self._command = [part.replace("{port}", str(port)) for part in command]
        self._report = report
        self._timeout = timeout
        self._environment = SERVER_ENVIRONMENT | (environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        handle, path = tempfile.mkstemp(prefix="vllm-diffusion-", suffix=".log")
        self.log_path = Path(path)
        try:
            # No interrupt comes between a process and the note of it.
            with os.fdopen(handle, "wb") as log, _signals_held():
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | self._environment | {"VLLM_API_KEY": self.api_key},
                    # A process group of its own: Ctrl-C reaches us alone, and we can end all of it.
                    start_new_session=True,
                )
            self._wait_until_ready(self._process)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.stop()
        if kind is None or not issubclass(kind, Exception):
            self.log_path.unlink(missing_ok=True)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        start = last_report = time.monotonic()
        reported = ""
        while not self._is_healthy():
            if process.poll() is not None:
                raise ServerError(
                    f"The server stopped with exit status {process.returncode} before it was ready."
                )
            now = time.monotonic()
            if now - start > self._timeout:
                raise ServerError(f"The server was not ready after {self._timeout:.0f} s.")
            stage = self._stage()
            if stage != reported or now - last_report >= _REPORT_SECONDS:
                last_report, reported = now, stage
                self._report(f"{now - start:5.0f} s  {stage}")
            time.sleep(_POLL_SECONDS)

    def _is_healthy(self) -> bool:
        try:
            with _http.open(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _stage(self) -> str:
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        return next(stage for marker, stage in _STAGES if marker in log)

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(log.splitlines()[-_LOG_TAIL_LINES:])

    def samples(self) -> list[Sample]:
        """All that the server's ``/metrics`` says at this moment."""
        try:
            with _http.open(f"{self.url}/metrics", timeout=30) as response:
                text = response.read().decode()
        except OSError as error:
            raise ServerError(f"The server's /metrics cannot be read: {error}.") from error
        return [each for family in text_string_to_metric_families(text) for each in family.samples]

    def counters(self) -> dict[str, float]:
        """:meth:`samples` by name, summed over their labels."""
        totals: dict[str, float] = {}
        for sample in self.samples():
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def processes(self) -> list[int]:
        """Ids of the server's first process and of all that it started; none once it has ended."""
        if self._process is None:
            return []
        try:
            first = psutil.Process(self._process.pid)
            return [each.pid for each in (first, *first.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """End the server and every process it started. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            for kind, patience in _STOP_SECONDS:
                if kind is signal.SIGINT:
                    # The server's first process ends its engine in order.
                    process.send_signal(kind)
                else:
                    _signal_group(process.pid, kind)
                try:
                    process.wait(patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            # What it left behind, or all of it if somebody is too impatient for the above.
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that end this process, and that Python handles, are handled behind the block."""
    if threading.current_thread() is not threading.main_thread():
        # They reach the main thread alone.
        yield
        return
    came: list[int] = []
    ending = (signal.SIGINT, *ENDING_SIGNALS)
    kinds = [kind for kind in ending if callable(signal.getsignal(kind))]
    handlers = {kind: signal.signal(kind, lambda number, _: came.append(number)) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        for number in came:
            signal.raise_signal(number)


def _signal_group(group: int, kind: signal.Signals) -> None:
    try:
        os.killpg(group, kind)
    except ProcessLookupError:
        # Nobody is left.
        return


def free_port() -> int:
    """A port that nobody listens on.

    Below those that Linux hands to whoever asks for any: until a server has it, seconds later, no
    connection of another process takes it.
    """
    while True:
        # Not by `random`, which vLLM seeds: two processes that had engines would choose the same.
        port = 10_000 + secrets.randbelow(22_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def vllm_serve(model: str, *options: str) -> list[str]:
    """The command line of a server for ``model`` on this machine only."""
    return [
        *VLLM_SERVE,
        *(model, "--host", HOST, "--port", "{port}"),
        *options,
    ]
