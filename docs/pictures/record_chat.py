"""Record ``vllm-diffusion chat`` as an animated SVG, from the shipped checkpoint.

    python docs/pictures/record_chat.py

Types a question in a terminal of 80 columns and writes what it showed to ``chat.svg`` beside this
file. A canvas takes a fraction of a second here, so the drawing plays it more slowly and says so.
"""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from html import escape
from pathlib import Path

import pyte

COLUMNS, ROWS = 80, 12
QUESTION = "Add up: 8+14, 8+9, 14+8, 1+1, 19+4, 2+14, 20+7, 3+1, 3+9, 20+9, 5+20, 7+20."
# Seconds that a screen is shown: while the canvas changes, and when the answer is there.
SHOWN, LAST = 0.35, 4.0
CELL_WIDTH, CELL_HEIGHT, MARGIN = 9.0, 20.0, 16.0
START_SECONDS = 900.0


def record() -> list[list[list[tuple[str, bool]]]]:
    """Screens, each different from the one before: rows of runs of text, and whether they are
    dim.
    """
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_diffusion.cli.main", "chat"],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    screen = Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    screens: list[list[list[tuple[str, bool]]]] = []
    asked, shown = False, b""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if not select.select([leader], [], [], 0.5)[0]:
            if asked and b"tokens a second" in shown:
                break
            continue
        # A screen at a time: the terminal is told of each in one piece.
        data = os.read(leader, 65536)
        shown += data
        for piece in re.split(rb"(?=\r\x1b\[2K)", data):
            stream.feed(piece)
            is_drawn = b"step" in piece or b"tokens a second" in piece
            if is_drawn and (not screens or screens[-1] != screen.runs()):
                screens.append(screen.runs())
        if not asked and b"> " in shown:
            screen.reset()
            asked = True
            stream.feed(b"> ")
            os.write(leader, QUESTION.encode() + b"\n")
    os.write(leader, b"\x04")
    process.wait(60)
    return screens


class Screen(pyte.Screen):
    """A terminal's screen that knows dim text, which pyte does not."""

    def select_graphic_rendition(self, *attributes: int, **options: bool) -> None:
        """Dim is kept as a colour."""
        super().select_graphic_rendition(*attributes, **options)
        if 2 in attributes:
            super().select_graphic_rendition(90)

    def runs(self) -> list[list[tuple[str, bool]]]:
        """Rows of runs of equal style."""
        rows = []
        for y in range(self.lines):
            runs: list[tuple[str, bool]] = []
            for x in range(self.columns):
                cell = self.buffer[y][x]
                is_dim = cell.fg == "brightblack"
                if runs and runs[-1][1] == is_dim:
                    runs[-1] = (runs[-1][0] + cell.data, is_dim)
                else:
                    runs.append((cell.data, is_dim))
            rows.append(runs)
        return rows


def drawing(screens: list[list[list[tuple[str, bool]]]]) -> str:
    """An SVG that shows one screen after another, and begins again."""
    times = [SHOWN] * (len(screens) - 1) + [LAST]
    total = sum(times)
    width, height = 2 * MARGIN + COLUMNS * CELL_WIDTH, 2 * MARGIN + ROWS * CELL_HEIGHT
    style = [
        "text{font:15px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#e6e6e6;"
        "white-space:pre}.dim{fill:#7d8590}",
        f"g.s{{visibility:hidden;animation:{total:.2f}s step-end infinite}}",
    ]
    groups = []
    begin = 0.0
    for i, (rows, seconds) in enumerate(zip(screens, times, strict=True)):
        first, last = 100 * begin / total, 100 * (begin + seconds) / total
        shown = f"{first:.3f}%{{visibility:visible}}{last:.3f}%{{visibility:hidden}}"
        style.append(f"@keyframes k{i}{{0%{{visibility:hidden}}{shown}}}")
        begin += seconds
        lines = []
        for y, runs in enumerate(rows):
            x = 0
            for run, is_dim in runs:
                text = run.rstrip()
                if text:
                    left, top = MARGIN + x * CELL_WIDTH, MARGIN + (y + 0.8) * CELL_HEIGHT
                    kind = ' class="dim"' if is_dim else ""
                    lines.append(
                        f'<text x="{left:.0f}" y="{top:.0f}" textLength="{len(text) * CELL_WIDTH:.0f}"'
                        f"{kind}>{escape(text)}</text>"
                    )
                x += len(run)
        groups.append(f'<g class="s" style="animation-name:k{i}">{"".join(lines)}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        'aria-label="A terminal in which the canvas of an answer resolves, step by step.">'
        f"<style>{''.join(style)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{"".join(groups)}</svg>\n'
    )


def main() -> None:
    screens = record()
    path = Path(__file__).with_name("chat.svg")
    path.write_text(drawing(screens), encoding="utf-8")
    print(f"{path}: {len(screens)} screens, {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
