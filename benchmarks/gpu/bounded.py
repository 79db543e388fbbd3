"""A command that is ended at a limit, with everything that it started."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

# Between asking a command to stop and stopping it.
GRACE_SECONDS = 15
_PR_SET_CHILD_SUBREAPER = 36


def run_bounded(
    command: Sequence[str],
    environment: dict[str, str],
    folder: Path,
    seconds: float,
    log: IO[bytes],
) -> int | None:
    """Run a command to its end or to a limit, and leave nothing of it behind.

    Args:
        command: Its words.
        environment: All of it.
        folder: Where it runs.
        seconds: The limit.
        log: A file for what it prints.

    Returns:
        Its exit status; ``None`` if it was stopped.
    """
    others = _children()
    # What it starts and leaves becomes this process's child, and not init's.
    _adopt_orphans(True)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        # As from the keyboard, so that servers are stopped by those who started them.
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _end_orphans(others)
        _adopt_orphans(False)


def _adopt_orphans(adopts: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def _end_orphans(others: set[int]) -> None:
    """End every child of this process but ``others``, and theirs as they become its own."""
    while children := _children() - others:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid():
            found.add(int(stat.parent.name))
    return found
