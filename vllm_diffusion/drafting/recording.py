"""Recordings: token ids of a server's own traffic on disk, which drafts are calibrated on.

A *recording* is a folder of JSON lines that its owner alone can read. A line is an *exchange*: a
prompt and the target's answer. Each engine writes files of its own in turn, and its oldest files
are deleted when all of them would exceed their limit. The files are this ring's only state, so that
it outlives its server and may be cleared while it is written.

Sampled or greedy, drafted or not: the answers are the target's own, and a replay gives its hidden
states.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import msgspec

from vllm_diffusion.weights.regular_files import open_own, why_not_file, why_not_folder

# Files of an engine: an eighth of the limit is deleted at once.
_NUM_SEGMENTS = 8
# Token ids that wait for the disk, at most; a disk slower than the traffic loses the rest.
_MAX_PENDING_TOKENS = 2**22
# Seconds that a server which shuts down waits for pending writes.
_CLOSE_SECONDS = 5.0
# One exchange in this many is held out of training.
_HELD_OUT_EVERY = 10
_SUFFIX = ".jsonl"
# Largest valid id. The target's vocabulary sets the real bound.
_MAX_TOKEN_ID = 2**31 - 1
_FORM = (
    "a line has prompt_token_ids and output_token_ids, or token_ids, which are lists of token ids."
)


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer.

    Attributes:
        prompt_token_ids: Tokens of the prompt, ``array("i")``, may be empty.
        output_token_ids: Tokens of the answer, ``array("i")``, the target's own.
        time: Time of its end, in seconds since the epoch; 0 if unknown.
    """

    prompt_token_ids: array[int]
    output_token_ids: array[int]
    time: float = 0.0

    @property
    def token_ids(self) -> array[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def is_held_out(self) -> bool:
        """True if drafts are compared on it and never trained on it; the prompt alone decides
        this.
        """
        prompt = self.prompt_token_ids or self.output_token_ids
        return zlib.crc32(prompt.tobytes()) % _HELD_OUT_EVERY == 0


@dataclass(frozen=True)
class Recording:
    """Content of a recording.

    Attributes:
        exchanges: Exchanges, oldest first.
        num_damaged: Number of damaged lines, half written when a server was killed or its disk was
            full.
    """

    exchanges: list[Exchange] = field(default_factory=list)
    num_damaged: int = 0


def read_recording(path: str | Path) -> Recording:
    """Read all exchanges of a recording, or of one file of JSON lines.

    A line of a user's file holds ``prompt_token_ids`` and ``output_token_ids``, or ``token_ids``.

    Args:
        path: Folder, whose damaged lines are counted, or a file, which must have none.

    Raises:
        ValueError: Naming the path, and the line, if it cannot be read or holds no exchange.
    """
    path = Path(path)
    exchanges: list[Exchange] = []
    num_damaged = 0
    try:
        if not os.path.isdir(path):
            if os.path.exists(path) and (problem := why_not_file(path)):
                raise ValueError(f"{path} {problem}; copy what it gives to a file first.")
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    try:
                        exchanges.append(_parsed(line))
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number}: {error}") from None
        else:
            if problem := why_not_folder(path):
                raise ValueError(f"{path} {problem}; take it out of the folder.")
            for file in sorted(path / name for name in os.listdir(path) if name.endswith(_SUFFIX)):
                try:
                    content = file.read_bytes()
                except FileNotFoundError:
                    # It was the oldest of a ring that is being written.
                    continue
                for line in content.splitlines():
                    try:
                        exchanges.append(_parsed(line))
                    except ValueError:
                        num_damaged += 1
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; name the folder that a server records to, or a "
            "file of JSON lines."
        ) from None
    if not exchanges:
        raise ValueError(
            f"{path} holds no exchange; record some first (drafting.record of --additional-config)."
        )
    exchanges.sort(key=lambda exchange: exchange.time)
    return Recording(exchanges, num_damaged)


_Ids = list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKEN_ID)]]


class _Line(msgspec.Struct, omit_defaults=True):
    """A line of a file.

    Attributes:
        time: Seconds since the epoch.
        prompt_token_ids: Tokens of the prompt; a line that has none has ``token_ids``.
        output_token_ids: Tokens of the answer.
        token_ids: Tokens of an answer without its prompt.
    """

    time: float = 0.0
    prompt_token_ids: _Ids | None = None
    output_token_ids: _Ids = []
    token_ids: _Ids | None = None


def _parsed(line: bytes) -> Exchange:
    """Read one line.

    Raises:
        ValueError: Naming what is wrong with it.
    """
    try:
        parsed = msgspec.json.decode(line, type=_Line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{error}; {_FORM}") from None
    prompt, output = parsed.prompt_token_ids, parsed.output_token_ids
    if parsed.token_ids is not None:
        prompt, output = [], parsed.token_ids
    if prompt is None:
        raise ValueError(f"prompt_token_ids is missing; {_FORM}")
    if not output:
        raise ValueError("the answer has no tokens; remove the line.")
    return Exchange(array("i", prompt), array("i", output), parsed.time)


def wants_recording(extra_args: Mapping[str, Any] | None) -> bool:
    """Return true if a request may be recorded: its argument ``record`` is absent or true.

    Args:
        extra_args: ``SamplingParams.extra_args``; over HTTP ``vllm_xargs``, which turns booleans
            into 0 and 1.
    """
    return (extra_args or {}).get("record", True) in (True, "true", "True")


@dataclass(frozen=True)
class Ring:
    """One engine's files in a recording.

    Attributes:
        folder: Folder of the recording.
        name: Name of the engine.
        max_bytes: Limit for all files of the engine, never exceeded.
    """

    folder: Path
    name: str
    max_bytes: int

    def lock(self) -> int:
        """Make the folder if it is absent, and lock these files against other servers.

        Returns:
            A file descriptor; closing it releases the lock.

        Raises:
            ValueError: Naming the folder and the remedy, if it cannot be written, belongs to
                another user or others may see into it, or another server writes there.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_folder()
            for number in self._files():
                os.close(open_own(self._path(number)))
            handle = open_own(self.folder / f".{self.name}.lock", os.O_CREAT)
        except OSError as error:
            raise ValueError(
                f"folder={str(self.folder)!r} cannot be written: {error.strerror}; name a folder that "
                "the server may write."
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise ValueError(
                f"folder={str(self.folder)!r} is in use by another server; give each its own."
            ) from None
        return handle

    def _check_folder(self) -> None:
        status = self.folder.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            raise ValueError(
                f"folder={str(self.folder)!r} is a link; name the folder that it leads to."
            )
        if status.st_uid != os.geteuid():
            raise ValueError(
                f"folder={str(self.folder)!r} belongs to user {status.st_uid}, and the server runs as user "
                f"{os.geteuid()}; name a folder that this user owns, or one that does not exist yet."
            )
        if mode & 0o077:
            raise ValueError(
                f"folder={str(self.folder)!r} is open to other users (mode {mode:o}); "
                "recordings must be private: name a folder that does not exist yet, or chmod 700 it."
            )

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines, each of which ends with a line feed; old ones make room.

        A line larger than the ring is left out.

        Raises:
            OSError: If the disk takes no more; a line may be half written then.
        """
        files = self._files()
        for line in lines:
            size = len(line)
            if size > self.max_bytes:
                continue
            newest = max(files, default=0)
            if files.get(newest, 0) + size > self.max_bytes // _NUM_SEGMENTS:
                newest += 1
            # One more byte: a half-written line may have to be ended first.
            while files and sum(files.values()) + size + 1 > self.max_bytes:
                oldest = min(files)
                self._path(oldest).unlink(missing_ok=True)
                del files[oldest]
            _write(self._path(newest), line)
            files[newest] = self._path(newest).stat().st_size

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:08d}{_SUFFIX}"

    def _files(self) -> dict[int, int]:
        """Return the size of each file in bytes, by number."""
        sizes = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name, _, number = entry.name.removesuffix(_SUFFIX).rpartition("-")
                if name == self.name and number.isdecimal():
                    sizes[int(number)] = entry.stat(follow_symlinks=False).st_size
        return sizes


def _write(path: Path, line: bytes) -> None:
    handle = open_own(path, os.O_APPEND | os.O_CREAT)
    try:
        end = os.fstat(handle).st_size
        if end and os.pread(handle, 1, end - 1) != b"\n":
            line = b"\n" + line
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(handle, rest) :]
    finally:
        os.close(handle)


class Recorder:
    """Writer of exchanges in a thread of its own: the engine never waits for a disk.

    No method but the constructor raises: an exchange that cannot be written is lost, and ``warn``
    is called for the first one.
    """

    def __init__(self, ring: Ring, warn: Callable[[str], None]) -> None:
        """Lock the ring and start the thread.

        Args:
            ring: Files to write to.
            warn: Called with a message for the first lost exchange.

        Raises:
            ValueError: As :meth:`Ring.lock`.
        """
        self._ring, self._warn = ring, warn
        self._lock = ring.lock()
        # ``None`` ends the thread.
        self._pending: SimpleQueue[tuple[float, Sequence[int], Sequence[int]] | None]
        self._pending = SimpleQueue()
        # Tokens so far; each number is counted by one thread alone.
        self._num_queued = self._num_written = 0
        self._is_closed = self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def add(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """Queue an exchange. Neither sequence may change afterwards."""
        num_queued = self._num_queued + len(prompt_token_ids) + len(output_token_ids)
        if num_queued - self._num_written > _MAX_PENDING_TOKENS:
            self._lose("its disk is slower than the traffic")
            return
        self._num_queued = num_queued
        self._pending.put((time.time(), prompt_token_ids, output_token_ids))

    def close(self) -> None:
        """Write pending exchanges, for a few seconds at most, and release the files."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pending.put(None)
        self._thread.join(_CLOSE_SECONDS)
        os.close(self._lock)

    def _run(self) -> None:
        while (exchange := self._pending.get()) is not None:
            try:
                self._ring.append([_line(*exchange)])
            except OSError as error:
                self._lose(error.strerror or str(error))
            self._num_written += len(exchange[1]) + len(exchange[2])

    def _lose(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"Traffic is being lost that was to be recorded in {self._ring.folder}: {why}. Serving "
                "goes on; this is reported once."
            )


def _line(at: float, prompt: Sequence[int], output: Sequence[int]) -> bytes:
    return msgspec.json.encode(_Line(round(at, 3), list(prompt), list(output))) + b"\n"
