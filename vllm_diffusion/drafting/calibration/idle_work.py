"""Background work for a server's idle time: niced, halted while the server is busy, and capped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

# Lowest priority: the process takes only the CPU time that others leave.
_NICENESS = ("nice", "-n", "19")
_POLL_SECONDS = 0.5


class IdleWorkError(Exception):
    """A command failed or reached a cap. The message is for the user."""


@dataclass
class IdleWork:
    """Runner of commands, one after the other, while the server is idle.

    Attributes:
        is_busy: Returns true while the server has work; called twice a second.
        seconds: Limit for all commands together; time in which they are halted does not count.
        max_bytes: Limit for the memory of all processes of a command.
        report: Called with a line when a command is halted and when it goes on.
        spent: Seconds that the commands have run so far.
    """

    is_busy: Callable[[], bool]
    seconds: float
    max_bytes: int
    report: Callable[[str], None] = lambda line: None
    spent: float = field(default=0.0, init=False)

    @property
    def seconds_left(self) -> float:
        """Seconds that the commands may still run."""
        return self.seconds - self.spent

    def run(self, name: str, command: Sequence[str]) -> str:
        """Run one command to its end.

        While the server is busy, a signal halts all processes of the command; they keep their
        memory.

        Args:
            name: Name of the command in messages.
            command: Program and arguments.

        Returns:
            Output of the command, errors included.

        Raises:
            IdleWorkError: If it fails, or exceeds a limit: it is killed then.
        """
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                [*_NICENESS, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own, for signals to all of its processes.
                start_new_session=True,
            )
            try:
                self._watch(name, process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            printed = output.read()
        if process.returncode:
            last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
            raise IdleWorkError(f"{name} failed: {last}")
        return printed

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        is_halted = False
        then = time.monotonic()
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if not is_halted:
                self.spent += now - then
            then = now
            if self.seconds_left <= 0:
                raise IdleWorkError(f"{name} reached the cap of {self.seconds / 60:g} minutes.")
            if _bytes_of(process.pid) > self.max_bytes:
                raise IdleWorkError(
                    f"{name} reached the cap of {self.max_bytes / 2**30:g} GiB of memory."
                )
            if self.is_busy() != is_halted:
                is_halted = not is_halted
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGSTOP if is_halted else signal.SIGCONT)
                self.report(
                    f"{name}: halted, the server has work" if is_halted else f"{name}: goes on"
                )


def _bytes_of(pid: int) -> int:
    """Return the resident memory of a process and its descendants; shared pages count for each."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total
