"""Displays of an answer: plain text, or in a terminal with the canvas that is being denoised."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from vllm_diffusion.cli.answer import Answer, Display
from vllm_diffusion.cli.values import printable

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text


def display_for(out: TextIO, *, plain: bool = False) -> Display:
    """Choose canvases for a terminal that can draw them, and plain text for anything else."""
    can_draw = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return LiveDisplay(out) if can_draw and not plain else PlainDisplay(out)


class PlainDisplay:
    """Text as it is committed, and nothing else."""

    draws_canvases = False

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._ends_line = True

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._ends_line:
            self._out.write("\n")
            self._out.flush()

    def committed(self, piece: str, answer: Answer) -> None:
        self._out.write(piece)
        self._out.flush()
        self._ends_line = piece.endswith("\n")

    def frame(self, frame: Any, answer: Answer) -> None:
        """Ignore the frame; a server sends none where canvases are not drawn."""


class LiveDisplay:
    """Committed text, the canvas with its kept tokens plain and the rest dim, and a line of figures."""

    draws_canvases = True

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=out, highlight=False, soft_wrap=False)
        self._live: Live = Live(console=self._console, auto_refresh=False)
        self._canvas: Any = None
        self._answer = Answer()

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        # What stays on the screen is what was said.
        self._canvas = None
        self._draw()
        self._live.stop()

    def committed(self, piece: str, answer: Answer) -> None:
        self._answer, self._canvas = answer, None
        self._draw()

    def frame(self, frame: Any, answer: Answer) -> None:
        self._answer, self._canvas = answer, frame
        self._draw()

    def _draw(self) -> None:
        self._live.update(self._drawing(), refresh=True)

    def _drawing(self) -> Text:
        from rich.text import Text

        frame = self._canvas
        if frame is None:
            return Text(self._answer.text)
        # Tokens of a canvas may be here before its last frames where many come at once.
        drawing = Text(self._answer.text[: frame.offset])
        # A thought comes before the text; it is no part of the answer.
        rest = (getattr(frame, "reasoning", None) or "") + frame.text
        for token, is_kept in zip(frame.tokens, frame.kept, strict=True):
            # Special tokens, what an end throws away and parts of characters are no text by themselves.
            if token and rest.startswith(token):
                drawing.append(printable(token), style="" if is_kept else "dim")
                rest = rest[len(token) :]
        drawing.append(printable(rest), style="dim")
        again = ", begun anew" if frame.begins_anew else ""
        drawing.append(
            f"\ncanvas {frame.block + 1}, {_step_in_words(frame.step, frame.total)}{again}",
            style="italic dim",
        )
        return drawing


def _step_in_words(step: int, total: int) -> str:
    """Describe a step, which a constraint may take past the cap."""
    if step > total:
        return f"step {step}, {step - total} past the cap of {total}"
    return f"step {step} of at most {total}"


def figures(answer: Answer) -> str:
    """Describe in one line what an answer took, without what is not known."""
    parts = []
    if answer.num_steps:
        parts.append(f"{answer.num_steps} steps on {answer.num_canvases} canvases")
    if answer.num_steps and answer.num_tokens:
        parts.append(f"{answer.num_tokens / answer.num_steps:.1f} tokens a step")
    if answer.seconds and answer.num_tokens:
        parts.append(f"{answer.num_tokens / answer.seconds:.1f} tokens a second")
    return ", ".join(parts)
