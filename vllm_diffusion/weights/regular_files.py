"""Checks that a user's path leads to regular files only, and reads one of JSON.

Opening a named pipe waits for a writer, and reading a device need not end: one such file would keep
a server waiting for ever.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def why_not_file(path: str | Path) -> str | None:
    """Return why a path is not opened as a file; links are followed.

    Returns:
        The end of a sentence that begins with the path, or ``None`` for a regular file.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        return _cannot_be_read(error)
    return None if stat.S_ISREG(mode) else _not_regular(mode)


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Return a value that differs if a file may have changed; ``None`` if there is no file."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def json_object(path: Path) -> dict[str, Any]:
    """Read a file of one JSON object.

    Raises:
        ValueError: With the end of a sentence that begins with the file, if it holds none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError("is JSON that is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("must hold a JSON object")
    return content


def why_not_folder(path: str | Path) -> str | None:
    """Return why a folder is not read: one of its entries is neither a regular file nor a folder.

    Returns:
        The end of a sentence that begins with the path, or ``None`` for a folder of regular files.
    """
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    mode = entry.stat().st_mode
                except OSError:
                    # A dangling link counts as a missing file.
                    continue
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    return f"holds {entry.name}, which {_not_regular(mode)}"
    except (OSError, ValueError) as error:
        return _cannot_be_read(error)
    return None


def check_regular_files(directory: Path) -> None:
    """Refuse a checkpoint's folder with files that are not regular, whose reading may never end.

    Raises:
        ValueError: Naming the folder, the file and what to do.
    """
    if directory.is_dir() and (problem := why_not_folder(directory)):
        raise ValueError(f"{directory} {problem}; copy or download the checkpoint again.")


def open_own(path: Path, flags: int = 0) -> int:
    """Open a file of this user alone, to read and write it, without waiting for a named pipe.

    Args:
        path: Path of the file.
        flags: Further flags of ``os.open``.

    Returns:
        A file descriptor.

    Raises:
        OSError: If it cannot be opened, is a link or no regular file, belongs to another user than
            this process's, or others may read it.
    """
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} is a link") from None
        raise
    status = os.fstat(handle)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = _not_regular(status.st_mode)
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}"
    elif status.st_mode & 0o077:
        problem = f"is open to other users (mode {stat.S_IMODE(status.st_mode):o})"
    if problem is not None:
        os.close(handle)
        raise OSError(errno.EPERM, f"{path.name} {problem}")
    return handle


def _not_regular(mode: int) -> str:
    return f"is {_KINDS.get(stat.S_IFMT(mode), 'of an unknown kind')} and not a regular file"


def _cannot_be_read(error: OSError | ValueError) -> str:
    # A path with a null byte in it is a ValueError of Python's.
    return f"cannot be read ({getattr(error, 'strerror', None) or error})"
