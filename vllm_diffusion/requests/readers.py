"""Processes in which constraints of clients are compiled, and which the kernel ends when one takes
too long.

llguidance's own limits do not hold while expressions are joined, and xgrammar has none: a schema or
a grammar of 1 KB may keep them for ever, and a thread cannot be given up. So the API process asks
another process, which has limited seconds and memory (``RLIMIT_CPU``, ``RLIMIT_AS``) and does not
outlive the API process, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from vllm_diffusion.requests.guidance import EBNF, compile_problem
from vllm_diffusion.requests.threads import LeavableThreads, deep_thread

# CPU seconds for all that one reading compiles. The largest accepted schemas take 1 s.
MOST_SECONDS = 5
_MOST_BYTES = 4 * 2**30
_IMPORT_SECONDS = 120
GIVEN_UP = (
    f"takes more than {MOST_SECONDS} s or {_MOST_BYTES // 2**30} GiB to compile; make it simpler"
)
# Two, so that a large schema does not hold up a small one.
_NUM_THREADS = 2
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from vllm_diffusion.requests.readers import serve; serve(int(sys.argv[1]))"
)

# The reader of a thread's reading.
_of_thread = threading.local()


class _Reader:
    """A process that compiles constraints one after the other, and answers what is wrong with
    them.
    """

    # Those that wait for the next reading.
    _idle: ClassVar[list[_Reader]] = []

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self.is_wanted = True

    @classmethod
    def take(cls) -> _Reader:
        """Return a process whose limit of time begins now."""
        while True:
            try:
                reader = cls._idle.pop()
            except IndexError:
                reader = cls._start()
            with contextlib.suppress(OSError):
                reader._connection.send(MOST_SECONDS)
                return reader
            reader.end()

    @classmethod
    def _start(cls) -> _Reader:
        try:
            return cls()
        except OSError as error:
            from vllm.exceptions import RetryableRequestError

            raise RetryableRequestError(
                f"The server cannot start a process that reads constraints ({error.strerror}). Ask again later, or raise "
                "its limits (ulimit -n for open files, -u for processes)."
            ) from error

    def give_back(self) -> None:
        """Keep the process for the next reading, if it has not ended."""
        if self._process.poll() is None:
            self._idle.append(self)
        else:
            self.end()

    def ask(self, *question: Any) -> Any:
        """Return the answer to a question; :data:`GIVEN_UP` from a process that has ended.

        Raises:
            CancelledError: If nobody waits for it any more.
        """
        answer = GIVEN_UP
        if self.is_wanted:
            with contextlib.suppress(EOFError, OSError):
                self._connection.send(question)
                answer = self._connection.recv()
        if not self.is_wanted:
            raise CancelledError
        return answer

    def end(self) -> None:
        """End the process, whatever it compiles. Safe in any thread, and to call twice."""
        self._process.kill()
        self._process.wait()


class Reading:
    """A context in which a thread reads one request: all that it has compiled there may take
    :data:`MOST_SECONDS` together.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: _Reader | None = None
        self._is_wanted = True

    def __enter__(self) -> None:
        # Within another reading it is a part of that one.
        if getattr(_of_thread, "reader", None) is None:
            reader = _Reader.take()
            with self._lock:
                self._reader = _of_thread.reader = reader
                reader.is_wanted = self._is_wanted

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._reader is not None:
                self._reader.give_back()
                self._reader = _of_thread.reader = None

    def stop(self) -> None:
        """Give up what is compiled, if the reading goes on; another thread may call this."""
        with self._lock:
            self._is_wanted = False
            if self._reader is not None:
                self._reader.is_wanted = False
                self._reader.end()


def compiling_problem(kind: str, text: str) -> str | None:
    """Return why a constraint is not followed, in one line; ``None`` if it is.

    Args:
        kind: As ``guidance.guidance_grammar`` has it, or ``guidance.EBNF``.
        text: The constraint.

    Returns:
        What ``compile_problem`` finds in another process; :data:`GIVEN_UP` if it takes too long.
    """
    reader = getattr(_of_thread, "reader", None)
    if reader is None:
        with Reading():
            return compiling_problem(kind, text)
    answer: str | None = reader.ask(kind, text)
    return answer


async def read_aside(read: Callable[..., Any], *args: Any) -> Any:
    """Return what a function that reads a request returns, while the event loop serves others.

    Who stops waiting, as for a client that has left, ends the reading.
    """
    reading = Reading()

    def call() -> Any:
        with reading:
            return read(*args)

    try:
        return await asyncio.wrap_future(_threads().submit(call))
    finally:
        reading.stop()


@functools.cache
def _threads() -> LeavableThreads:
    return LeavableThreads(_NUM_THREADS, "constraint")


def serve(descriptor: int) -> None:
    """Answer questions until their connection is closed: the main function of a reader."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _MOST_BYTES)
    deep_thread(_answer, "answers", Connection(descriptor)).join()


def _answer(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = connection.recv()
            if isinstance(question, int):
                _limit_seconds(most := question)
            else:
                if question[0] == EBNF:
                    _import_xgrammar(most)
                with _ending_with_client(connection):
                    problem = compile_problem(*question)
                connection.send(problem)


@contextlib.contextmanager
def _ending_with_client(connection: Connection) -> Iterator[None]:
    """Within the block have the kernel end this process when the other end is closed: Python may
    not come to notice it there.
    """
    descriptor = connection.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    # SIGIO ends a process that does not handle it.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if connection.poll():
        # No question comes before an answer: it was closed before the line above.
        raise EOFError
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


@functools.cache
def _import_xgrammar(most: int) -> None:
    """Import xgrammar, which imports PyTorch, at no cost of the request that comes first."""
    _limit_seconds(_IMPORT_SECONDS)
    import xgrammar  # noqa: F401

    _limit_seconds(most)


def _limit_seconds(most: int) -> None:
    """Allow so many seconds of a core from now on."""
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + most)


def _limit(kind: int, most: int) -> None:
    """Set a limit of this process; beyond it the kernel ends it or gives it no memory."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
