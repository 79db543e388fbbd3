"""Servers in child processes: ``vllm serve`` is started, waited for, used and stopped."""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from vllm_diffusion.cli.client import KEY_VARIABLE, ServerError, ask

HOST = "127.0.0.1"
# Seconds between two looks at a server that is starting, and between two lines about it while it
# does the same thing.
_POLL_SECONDS = 0.25
_REPORT_SECONDS = 10.0
# What each signal is given before the next, harder one; SIGKILL is the last.
_STOP_SECONDS = ((signal.SIGINT, 15.0), (signal.SIGTERM, 5.0))
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
_HEALTH_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)
# A folder named vllm where the user happens to be is not imported in vLLM's place.
SERVER_ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
# The command that options follow: `vllm serve`, as this Python has it.
VLLM_SERVE = (sys.executable, "-m", "vllm_diffusion.cli.vllm_command", "serve")


class Server:
    """A server of this machine, by default on a free port of its own and with a random key.

    Use as a context manager: the block runs when the server is ready, and the server and all its
    processes are gone when the block is left, however it is left.

    Attributes:
        url: The server's root, such as ``http://127.0.0.1:<port>``.
        api_key: The key that clients send; empty if the server has none.
        log_path: The file of what the server prints. Kept only where it can explain an error.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        report: Callable[[str], None],
        timeout: float = math.inf,
        environment: dict[str, str] | None = None,
        url: str = "",
        shutdown_seconds: float = 0.0,
        verbose: bool = False,
    ) -> None:
        """Note what to start; nothing is started yet.

        Args:
            command: What to run, ``{port}`` standing for the port.
            report: Called with a line about progress every few seconds.
            timeout: Seconds that the server may take until it is ready.
            environment: Variables in addition to those of this process.
            url: Where the command itself has the server listen, with the key of this process if it
                has one; by default a free port, and a random key.
            shutdown_seconds: Time that the server gives its open requests when it is interrupted.
            verbose: Whether what the server prints is printed here too, as it comes.
        """
        port = free_port()
        self.url = url or f"http://{HOST}:{port}"
        # Hexadecimal: behind --api-key a hyphen at its front would make another option of it.
        self.api_key = os.environ.get(KEY_VARIABLE, "") if url else secrets.token_hex(32)
        self._command = [part.replace("{port}", str(port)) for part in command]
        self._report = report
        self._timeout = timeout
        self._shutdown_seconds = shutdown_seconds
        self._verbose = verbose
        # In the environment, not among the arguments, which every user of the machine can read.
        key = {KEY_VARIABLE: self.api_key} if self.api_key else {}
        self._environment = SERVER_ENVIRONMENT | (environment or {}) | key
        self._process: subprocess.Popen[bytes] | None = None
        self._printing: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        handle, path = tempfile.mkstemp(prefix="vllm-diffusion-", suffix=".log")
        os.close(handle)
        self.log_path = Path(path)
        is_main_thread = threading.current_thread() is threading.main_thread()
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | self._environment,
                    # A process group of its own: Ctrl-C reaches us alone, and we can end all of it.
                    start_new_session=True,
                    preexec_fn=_end_with_parent if is_main_thread else None,
                )
            if self._verbose:
                self._printing = _print_until_end(self.log_path, self._process.pid)
            self._wait_until_ready(self._process)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.stop()
        if self._printing is not None:
            self._printing.wait()
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
            log = self.log_path.read_text(encoding="utf-8", errors="replace")
            stage = next(stage for marker, stage in _STAGES if marker in log)
            if stage != reported or now - last_report >= _REPORT_SECONDS:
                last_report, reported = now, stage
                self._report(f"{now - start:5.0f} s  {stage}")
            time.sleep(_POLL_SECONDS)

    def _is_healthy(self) -> bool:
        try:
            return ask(f"{self.url}/health", timeout=_HEALTH_SECONDS, is_own=True).is_success
        except OSError:
            return False

    def log_end(self) -> str:
        """Name the log of a server that failed, with its last lines where they were not printed."""
        if self._verbose:
            return f"The server's log: {self.log_path}"
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        tail = "\n".join(log.splitlines()[-_LOG_TAIL_LINES:])
        return f"The end of the server's log, {self.log_path}:\n{tail}\n"

    def wait(self) -> None:
        """Return when the server has ended by itself.

        Raises:
            ServerError: If its exit status is not 0.
        """
        if self._process is not None and (status := self._process.wait()):
            raise ServerError(f"The server stopped with exit status {status}.")

    def processes(self) -> list[int]:
        """Return the ids of the server's first process and of all that it started; none once it has
        ended.
        """
        if self._process is None:
            return []
        return [each.pid for each in process_tree(self._process.pid)]

    def stop(self) -> None:
        """End the server and every process it started. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            for kind, patience in _STOP_SECONDS:
                # The server's first process ends its engine in order.
                process.send_signal(kind)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(patience + self._shutdown_seconds)
                    break
        finally:
            # What it has left, or all of it if somebody is too impatient for the above.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and all that it started; none once it has ended."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end_with_parent() -> None:
    """Have Linux end this process, a server's first one, when the one that started it has ended.

    A parent that is killed cannot stop its server. Linux counts the thread that starts a process as
    its parent: a server of another thread than the main one is left out.
    """
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _print_until_end(log: Path, pid: int) -> subprocess.Popen[bytes]:
    """Print a server's log to standard error as it grows, until the server has ended, in a process
    of its own.
    """
    return subprocess.Popen(
        ["tail", "--bytes=+1", "--follow", f"--pid={pid}", "--sleep-interval=0.2", str(log)],
        stdin=subprocess.DEVNULL,
        stdout=2,
        # Ctrl-C does not reach it: how the server ends is printed too.
        start_new_session=True,
    )


def free_port() -> int:
    """Find a port that nobody listens on.

    Below those that Linux hands to whoever asks for any: until a server has it, seconds later, no
    connection of another process takes it.
    """
    while True:
        # Not by `random`, which vLLM seeds: two processes that had engines would choose the same.
        port = 10_000 + secrets.randbelow(22_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port


def vllm_serve(model: str, *options: str) -> list[str]:
    """Return the command line of a server for ``model`` on this machine only."""
    return [*VLLM_SERVE, model, "--host", HOST, "--port", "{port}", *options]
