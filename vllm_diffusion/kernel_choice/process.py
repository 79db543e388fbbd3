"""Cases in a process of their own, which may crash or hang while this one goes on."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Literal, Self

from vllm_diffusion.kernel_choice.cases import KernelCase

COMMAND = (sys.executable, "-m", "vllm_diffusion.kernel_choice.child")
# Seconds of each shape of a case, most of which a compiler takes, and until the process has imported torch.
CASE_SECONDS, START_SECONDS = 20.0, 45.0
# Answered before each shape of a case: its time begins.
BEGINS = {"state": "begins"}
# What ends a process for reasons outside it.
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class CannotCheckError(Exception):
    """Why no process can run cases on this device."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case.

    Attributes:
        state: ``"refused"`` where the implementation does not take such inputs or such a GPU, and
            ``"unknown"`` where nothing was learnt about the kernel.
        why: Why it is not right; empty if it is.
        difference: Largest difference from float64.
        microseconds: Time of a call, if it was measured.
    """

    state: Literal["right", "wrong", "refused", "unknown"]
    why: str = ""
    difference: float | None = None
    microseconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is remembered of it."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


class CheckProcess:
    """A process that runs cases one after another, and another one after a case that ended it."""

    def __init__(
        self,
        device: str,
        *,
        seconds: float,
        measures: bool = False,
    ) -> None:
        """Prepare; the process starts with the first case.

        Args:
            device: For example ``"cuda:0"``.
            seconds: Seconds that all cases may take together.
            measures: True to time kernels too.
        """
        self._command = [*COMMAND, device]
        self._measures = measures
        self._deadline = time.monotonic() + seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
        self._log.close()

    def close(self) -> None:
        """End the process, and with it what it holds of the device."""
        child, self._child = self._child, None
        pipe, self._pipe = self._pipe, None
        if child is None or pipe is None:
            return
        child.kill()
        pipe.close()
        # In the driver it may take longer, which gives up a kernel that hangs in its own time.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)

    def check(self, case: KernelCase) -> Outcome:
        """Return the outcome of a case.

        Raises:
            CannotCheckError: If no process can start on the device.
        """
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            return Outcome("unknown", "no time was left")
        child, pipe = self._started()
        request = {
            "name": case.name,
            "seconds": CASE_SECONDS,
            "measures": self._measures,
            "case": pickle.dumps(case),
        }
        try:
            pipe.send(request)
            # What it imports first is no fault of the kernel's.
            seconds = 0.0
            answer = _received(pipe, min(START_SECONDS, self._deadline - time.monotonic()))
            while answer == BEGINS:
                seconds = min(CASE_SECONDS, self._deadline - time.monotonic())
                answer = _received(pipe, seconds)
        except (EOFError, OSError):
            return self._ended(child)
        if answer is None:
            self.close()
            if seconds < CASE_SECONDS:
                return Outcome("unknown", "no time was left")
            return Outcome("wrong", f"did not end in {CASE_SECONDS:.0f} s")
        if not answer.pop("goes_on", False):
            self.close()
        return Outcome(**answer)

    def _ended(self, child: subprocess.Popen[bytes]) -> Outcome:
        """Return the outcome of a case whose process ended without an answer."""
        status = child.wait(10)
        self.close()
        if status >= 0:
            return Outcome("wrong", f"its process ended with status {status}{self._last_line()}")
        name = signal.Signals(-status).name
        if -status in OUTSIDE:
            return Outcome("unknown", f"its process was ended by {name}")
        return Outcome("wrong", f"its process crashed ({name})")

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Return the process and the pipe to it, started if there is none."""
        if self._child is not None and self._pipe is not None:
            return self._child, self._pipe
        self._pipe, theirs = Pipe()
        with theirs:
            # What libraries print goes to the log.
            self._child = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
            )
        seconds = min(START_SECONDS, self._deadline - time.monotonic())
        problem = f"its process did not start in {seconds:.0f} s"
        try:
            if answer := _received(self._pipe, seconds):
                if answer["state"] == "right":
                    return self._child, self._pipe
                problem = answer["why"]
        except (EOFError, OSError):
            problem = f"its process ended at its start{self._last_line()}"
        self.close()
        raise CannotCheckError(problem)

    def _last_line(self) -> str:
        """Return the last line that the process printed, in brackets."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1].strip()[:200]})" if lines else ""


def _received(pipe: Connection, seconds: float) -> dict[str, Any] | None:
    """Return the next answer, or ``None`` after so many seconds.

    Raises:
        EOFError: If the process ended.
    """
    answer: dict[str, Any] | None = pipe.recv() if pipe.poll(max(0.0, seconds)) else None
    return answer
