"""Tests of ``vllm-diffusion chat`` in a terminal."""

import contextlib
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.support.doubles import fake_server
from tests.support.engines.server import Server as VllmServer
from vllm_diffusion.cli.server import Server

# Longer than forty columns, in several canvases.
QUESTION = "Put these words in capitals: lamp, tree, stone, river, cat, dog, bird, house."


def command(url: str) -> list[str]:
    return [sys.executable, "-m", "vllm_diffusion.cli.main", "chat", "--url", url]


def read_more(leader: int, process: subprocess.Popen[bytes]) -> bytes:
    """Read what a terminal gets next; nothing for a minute ends its program, and fails."""
    if not select.select([leader], [], [], 60)[0]:
        process.kill()
        pytest.fail("the terminal got nothing more")
    return os.read(leader, 65536)


def terminal(url: str, key: str, *entries: tuple[bytes, bytes | signal.Signals]) -> str:
    """Return what a terminal of forty columns got, with each entry typed once a text is there."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    process = subprocess.Popen(
        command(url),
        env={**os.environ, "VLLM_API_KEY": key, "TERM": "xterm", "COLUMNS": "40"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    shown = b""
    for awaited, entry in entries:
        while awaited not in shown:
            shown += read_more(leader, process)
        if isinstance(entry, signal.Signals):
            process.send_signal(entry)
        else:
            os.write(leader, entry)
    # A terminal whose program has ended cannot be read.
    with contextlib.suppress(OSError):
        while True:
            shown += read_more(leader, process)
    os.close(leader)
    assert process.wait(10) == 0
    return shown.decode()


@pytest.mark.engine
def test_canvas(server: VllmServer) -> None:
    """The canvas is drawn with dim undecided tokens, and at the end the answer is there once."""
    typed = f"/temperature 0\n{QUESTION}\n"
    plain = subprocess.run(
        command(server.url), input=typed, capture_output=True, text=True, check=True
    )
    entries = (b"> ", b"/temperature 0\n"), (b"temperature: 0", QUESTION.encode() + b"\n")
    shown = terminal(server.url, "", *entries, (b"tokens a step", b"/quit\n"))
    assert "canvas 2, step 1 of at most 16" in shown
    assert "\x1b[2m" in shown
    answer = plain.stdout.split()
    assert len(" ".join(answer)) > 40
    # What is drawn last, without what moves the cursor and sets a style.
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", " ", shown)
    last, _ = re.split(r"\d+ steps? on \d+ canvas", drawn)
    assert last[last.rindex(answer[0]) :].split() == answer


def test_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C stops the answer and not the program."""
    monkeypatch.chdir(tmp_path)
    with Server(fake_server.command("hangs"), report=lambda _: None) as running:
        stop = (b"15", signal.SIGINT)
        entries = (b"> ", b"Reverse.\n"), stop, (b"Stopped", b"/quit\n")
        assert "Traceback" not in terminal(running.url, running.api_key, *entries)


def test_line_editing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tab completes a command, and the up arrow returns to a line that can be edited."""
    monkeypatch.chdir(tmp_path)
    with Server(fake_server.command("good"), report=lambda _: None) as running:
        entries = (b"> ", b"/rese\t\n"), (b"settings stay", b"x/nowhere\x01\x1b[3~\n")
        entries += ((b"not a command", b"\x1b[A\x1b[D\x1b[3~\n"), (b"/nowher is not", b"/quit\n"))
        terminal(running.url, running.api_key, *entries)
