"""A recording is limited in size, private to its owner, and readable whatever happened to its
writer.
"""

import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_diffusion.drafting.recording import Recorder, Ring, read_recording, wants_recording

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
ANSWERS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


def line(prompt: Sequence[int], output: Sequence[int], **more: object) -> bytes:
    found = {"prompt_token_ids": list(prompt), "output_token_ids": list(output), **more}
    return json.dumps(found).encode() + b"\n"


def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path / "recording", "engine0", 2**20)


def recorded(path: Path) -> list[tuple[list[int], list[int]]]:
    found = read_recording(path).exchanges
    return [(list(each.prompt_token_ids), list(each.output_token_ids)) for each in found]


@given(
    exchanges=st.lists(st.tuples(IDS, ANSWERS), min_size=1, max_size=8),
    junk=st.binary(max_size=200).filter(lambda junk: b"token_ids" not in junk),
    data=st.data(),
)
def test_damage_never_breaks_a_reader(
    exchanges: list[tuple[list[int], list[int]]],
    junk: bytes,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A file that is cut at any byte, or has rubbish after the cut, is read up to there, and so is
    what is written afterwards.
    """
    ring = Ring(folder_of(tmp_path_factory), "engine0", 2**20)
    ring.append([line(*each, time=i) for i, each in enumerate(exchanges)])
    (file,) = ring.folder.glob("*.jsonl")
    content = file.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    for damage in (b"", b"\n" + junk):
        file.write_bytes(content[:cut] + damage)
        ring.append([line([1], [2, 3], time=99)])
        whole = content[:cut].count(b"\n") + (content[cut : cut + 1] == b"\n" and cut > 0)
        assert recorded(ring.folder) == [*exchanges[:whole], ([1], [2, 3])]
        assert damage or read_recording(ring.folder).num_damaged <= 1


@given(
    sizes=st.lists(st.integers(30, 3000), min_size=1, max_size=60),
    max_bytes=st.integers(200, 4000),
    batch=st.integers(1, 5),
)
def test_ring_is_bounded(
    sizes: list[int], max_bytes: int, batch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A recording never holds more bytes than its limit, and keeps the newest entries in order;
    only an entry longer than the limit is left out.
    """
    ring = Ring(folder_of(tmp_path_factory), "engine0", max_bytes)
    lines = [f"{i:06d}".ljust(size - 1, "x").encode() + b"\n" for i, size in enumerate(sizes)]
    for start in range(0, len(lines), batch):
        # Another engine's and another server's writers: the state is the files.
        Ring(ring.folder, "engine0", max_bytes).append(lines[start : start + batch])
        files = sorted(ring.folder.glob("engine0-*.jsonl"))
        assert sum(file.stat().st_size for file in files) <= max_bytes
    kept = b"".join(file.read_bytes() for file in files).splitlines(keepends=True)
    fitting = [each for each in lines if len(each) <= max_bytes]
    assert kept == fitting[len(fitting) - len(kept) :]
    if fitting:
        # Room for one entry more, and a file's share of the ring, is all that may be lost by
        # rotation.
        lost = fitting[: len(fitting) - len(kept)]
        assert kept
        assert (
            not lost or sum(map(len, kept)) + max(map(len, fitting)) + max_bytes // 8 >= max_bytes
        )


@given(prompt=IDS, output=ANSWERS)
# As long as long answers are.
@example(prompt=list(range(10_000)), output=list(range(4096)))
def test_reads_what_it_was_given(
    prompt: list[int], output: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A recording is read as it was written, with the time of each exchange."""
    folder = folder_of(tmp_path_factory)
    recorder = Recorder(Ring(folder, "engine0", 2**20), pytest.fail)
    recorder.add(prompt, output)
    recorder.close()
    assert recorded(folder) == [(prompt, output)]
    (found,) = read_recording(folder).exchanges
    assert found.token_ids == array("i", prompt + output)
    assert found.time > 1e9


def test_only_the_owner_reads(ring: Ring) -> None:
    """A recording is readable by its owner alone, whatever the umask."""
    old = os.umask(0)
    try:
        recorder = Recorder(ring, pytest.fail)
        recorder.add([1], [2])
        recorder.close()
    finally:
        os.umask(old)
    assert ring.folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in ring.folder.iterdir() if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_engines_beside_each_other(tmp_path: Path) -> None:
    """Several engines write to one folder in files of their own, and their entries are read
    together in order of time.
    """
    rings = [Ring(tmp_path / "r", f"engine{i}", 2**20) for i in (0, 1, 10)]
    recorders = [Recorder(ring, pytest.fail) for ring in rings]
    for ring, other in zip(rings, (5, 3, 1), strict=True):
        ring.append([line([other], [0], time=other)])
    assert recorded(tmp_path / "r") == [([1], [0]), ([3], [0]), ([5], [0])]
    for recorder in recorders:
        recorder.close()


def test_a_second_server_is_refused(ring: Ring) -> None:
    """A folder takes one server's recording at a time, and the next one's once it is closed."""
    recorder = Recorder(ring, pytest.fail)
    with pytest.raises(ValueError, match="in use by another server; give each its own"):
        Recorder(ring, pytest.fail)
    recorder.close()
    recorder.close()
    Recorder(ring, pytest.fail).close()


def test_open_folder_is_refused(
    ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that others can read, another user's, whatever its mode, and a link are refused with
    the remedy.
    """
    ring.folder.mkdir()
    for mode in (0o755, 0o770, 0o701):
        ring.folder.chmod(mode)
        with pytest.raises(ValueError, match=rf"\(mode {mode:o}\).* chmod 700 it"):
            ring.lock()
    ring.folder.chmod(0o700)
    os.close(ring.lock())
    (tmp_path / "link").symlink_to(ring.folder)
    with pytest.raises(ValueError, match="is a link; name the folder that it leads to"):
        Ring(tmp_path / "link", "engine0", 2**20).lock()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    words = f"belongs to user {os.getuid()}, .* name a folder that this user owns"
    with pytest.raises(ValueError, match=words):
        ring.lock()


def test_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """A folder that cannot be written is refused with the reason."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "below", Path("/proc/no/such"), Path("/" + "d/" * 2500)):
        with pytest.raises(ValueError, match="cannot be written: .*; name a folder that"):
            Ring(folder, "engine0", 2**20).lock()


def test_full_disk_is_reported_once(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is reported once, the caller notices nothing, and recording goes on when there is
    room.
    """
    warnings: list[str] = []
    recorder = Recorder(ring, warnings.append)
    write = os.write

    def full(handle: int, content: bytes) -> int:
        if bytes(content[:5]).startswith(b'{"tim'):
            return write(handle, content[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for _ in range(3):
            recorder.add([1], [2])
            recorder._thread.join(0.05)
    recorder.add([3], [4])
    recorder.close()
    (warning,) = warnings
    assert str(ring.folder) in warning
    assert "No space left on device" in warning
    assert recorded(ring.folder) == [([3], [4])]
    assert read_recording(ring.folder).num_damaged >= 1


def test_slow_disk_loses_and_never_waits(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk slower than the traffic loses exchanges with one warning, and delays nothing."""
    warnings: list[str] = []
    recorder = Recorder(ring, warnings.append)
    monkeypatch.setattr("vllm_diffusion.drafting.recording._MAX_PENDING_TOKENS", 10)
    recorder.add(range(9), range(9))
    recorder.add([1], [2])
    recorder.close()
    (warning,) = warnings
    assert "slower than the traffic" in warning
    assert recorded(ring.folder) == [([1], [2])]


def test_clearing_under_a_writer(ring: Ring) -> None:
    """A recording whose file is deleted meanwhile goes on with the next exchange."""
    recorder = Recorder(ring, pytest.fail)
    ring.append([line([1], [2])])
    (file,) = ring.folder.glob("*.jsonl")
    file.unlink()
    with pytest.raises(ValueError, match="holds no exchange; record some first"):
        read_recording(ring.folder)
    recorder.add([3], [4])
    recorder.close()
    assert recorded(ring.folder) == [([3], [4])]


def test_file_of_the_users(tmp_path: Path) -> None:
    """In a user's own file a line with one sequence is read as an answer without a prompt."""
    file = tmp_path / "own.jsonl"
    file.write_text('{"token_ids": [1, 2]}\n\n' + line([3], [4]).decode())
    assert recorded(file) == [([], [1, 2]), ([3], [4])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: Input data was truncated; a line has prompt_token_ids"),
        ("[1]", "line 1: Expected `object`, got `array`; a line has prompt_token_ids"),
        ('{"token_ids": [1]}\n{"a": 1}', "line 2: prompt_token_ids is missing; a line has"),
        ('{"token_ids": [-1]}', r"line 1: .*token_ids\[0\]`; a line has"),
        ('{"token_ids": [1.5]}', r"Expected `int`, got `float` - at `\$.token_ids\[0\]`"),
        ('{"token_ids": [true]}', r"Expected `int`, got `bool` - at `\$.token_ids\[0\]`"),
        ('{"token_ids": []}', "the answer has no tokens; remove the line"),
        (
            '{"prompt_token_ids": [1], "output_token_ids": "2"}',
            r"got `str` - at `\$.output_token_ids`",
        ),
        ('{"token_ids": [1], "time": "now"}', r"Expected `float`, got `str` - at `\$.time`"),
        ("", "holds no exchange; record some first"),
    ],
)
def test_bad_files(content: str, message: str, tmp_path: Path) -> None:
    """A file that is not a recording is refused with its name and the reason."""
    file = tmp_path / "own.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as refused:
        read_recording(file)
    assert str(file) in str(refused.value)


def test_no_recording(tmp_path: Path) -> None:
    """A recording that does not exist is refused with its path and the remedy."""
    with pytest.raises(ValueError, match="none cannot be read: No such file .* name the folder"):
        read_recording(tmp_path / "none")


def test_held_out_by_the_prompt(tmp_path: Path) -> None:
    """The prompt alone decides whether an exchange is held out, and about a tenth are."""
    file = tmp_path / "own.jsonl"
    file.write_bytes(b"".join(line([i, 7], [answer]) for i in range(2000) for answer in (1, 2)))
    found = read_recording(file).exchanges
    marks = [each.is_held_out for each in found]
    assert marks[::2] == marks[1::2]
    assert 0.07 < sum(marks) / len(marks) < 0.13


def test_requests_that_say_no_are_not_recorded() -> None:
    """A request is recorded unless its ``record`` is anything but true."""
    assert wants_recording(None)
    assert wants_recording({})
    assert all(wants_recording({"record": yes}) for yes in (1, True, "true"))
    assert not any(wants_recording({"record": no}) for no in (False, 0, "false", "no", None, [1]))
