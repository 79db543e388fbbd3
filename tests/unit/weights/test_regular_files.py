"""What is not a regular file is recognized without being opened, so no reader waits for a pipe."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_diffusion.drafting.recording import Recorder, Ring, read_recording
from vllm_diffusion.weights.regular_files import open_own, why_not_file, why_not_folder


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """Create a named pipe, and release in the end whoever waits for it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    yield path
    if path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def returns(work: Callable[[], Any]) -> Any:
    """Return the result of a call, or the message of its refusal; fail if it does not return."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except (ValueError, OSError) as error:
            found.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits for ever"
    return found[0]


def test_kinds(tmp_path: Path, pipe: Path) -> None:
    """A path that is not a readable regular file is reported with its kind or error."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "to pipe").symlink_to("pipe")
    (tmp_path / "to nothing").symlink_to("nothing")
    assert why_not_file(tmp_path / "file") is None
    assert why_not_file(tmp_path / "link") is None
    for path in (pipe, tmp_path / "to pipe"):
        assert why_not_file(path) == "is a named pipe and not a regular file"
    assert why_not_file("/dev/null") == "is a device and not a regular file"
    assert why_not_file(tmp_path) == "is a folder and not a regular file"
    assert why_not_file(tmp_path / "nothing") == "cannot be read (No such file or directory)"
    assert why_not_file("x" * 5000) == "cannot be read (File name too long)"
    assert why_not_file("a\0b") == "cannot be read (embedded null byte)"


def test_folders(tmp_path: Path) -> None:
    """A folder that is unreadable or holds something other than files is reported."""
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "file").write_text("")
    (folder / "to nothing").symlink_to("nothing")
    assert why_not_folder(folder) is None
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
    assert why_not_folder(folder) == "holds socket, which is a socket and not a regular file"
    assert why_not_folder(folder / "file") == "cannot be read (Not a directory)"
    assert why_not_folder("/" + "x/" * 3000) == "cannot be read (File name too long)"


def test_own_files(tmp_path: Path, pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, another user's file or a file open to others is not written to."""
    file = tmp_path / "file"
    os.close(open_own(file, os.O_CREAT))
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="link is a link"):
        open_own(tmp_path / "link")
    with pytest.raises(OSError, match="pipe is a named pipe"):
        open_own(pipe)
    file.chmod(0o640)
    with pytest.raises(OSError, match=r"file is open to other users \(mode 640\)"):
        open_own(file)
    file.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match=f"file belongs to user {os.getuid()}"):
        open_own(file)


def test_recordings(tmp_path: Path, pipe: Path) -> None:
    """A named pipe as a recording, or within one, is refused on reading and writing."""
    assert "is a named pipe" in returns(lambda: read_recording(pipe))
    folder = tmp_path / "r"
    ring = Ring(folder, "engine0", 2**20)
    recorder = Recorder(ring, pytest.fail)
    recorder.add([1], [2])
    recorder.close()
    os.mkfifo(folder / "engine0-00000001.jsonl", 0o600)
    assert "engine0-00000001.jsonl, which is a named pipe" in returns(
        lambda: read_recording(folder)
    )
    assert "engine0-00000001.jsonl is a named pipe" in returns(ring.lock)
    with pytest.raises(OSError, match="is a named pipe"):
        ring.append([b"[]\n"])
