"""Streamed answers of an OpenAI server, as text or in a terminal with the canvas that is being
denoised.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from vllm_diffusion.cli.client import ANSWER_SECONDS
from vllm_diffusion.cli.console import CommandError
from vllm_diffusion.cli.values import printable

if TYPE_CHECKING:
    from openai import OpenAI
    from rich.live import Live
    from rich.text import Text

# What a terminal needs of a frame: each token's text, and which tokens stay.
FRAMES = {"diffusion_frames": 1, "diffusion_frame_fields": ["tokens", "kept"]}


@dataclass
class Answer:
    """The server's answer.

    Attributes:
        text: The answer as far as it came, harmless to a terminal.
        num_tokens: Its length in tokens, as the server counts; 0 if it broke off.
        seconds: From sending the request to the last token.
        num_steps: Denoising steps that were seen.
        num_canvases: Canvases that were seen.
        finish_reason: Why it ended; ``None`` if it broke off.
    """

    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    num_steps: int = 0
    num_canvases: int = 0
    finish_reason: str | None = None


class AnswerError(CommandError):
    """Failure of a server that is there to answer. The message is for the user."""


def stream_answer(
    client: OpenAI, request: Mapping[str, Any], display: PlainDisplay | LiveDisplay
) -> Answer:
    """Show an answer as it arrives.

    Args:
        client: Of the server.
        request: Arguments of ``chat.completions.create``, but for those that make it a stream.
        display: Where it is shown; one that draws canvases is sent them.

    Raises:
        AnswerError: If the server refuses the request or breaks off.
    """
    answer = Answer()
    request = dict(request)
    extra_body = dict(request.pop("extra_body", {}))
    if display.draws_canvases:
        extra_body["vllm_xargs"] = {**FRAMES, **extra_body.get("vllm_xargs", {})}
    start = time.monotonic()
    try:
        with display:
            chunks = client.chat.completions.create(
                **request,
                extra_body=extra_body,
                stream=True,
                stream_options={"include_usage": True},
            )
            with chunks:
                for chunk in chunks:
                    answer.seconds = time.monotonic() - start
                    _take(chunk, answer, display)
    except Exception as error:
        # Errors of the HTTP library, and of the client, which reports what the server sends as one.
        if answer.seconds and not _is_sent(error):
            raise AnswerError(f"The server broke off in mid-answer: {error}") from error
        raise AnswerError(reason(error)) from error
    if answer.finish_reason is None:
        raise AnswerError("The server broke off in mid-answer.")
    return answer


def _take(chunk: Any, answer: Answer, display: PlainDisplay | LiveDisplay) -> None:
    if chunk.usage is not None:
        answer.num_tokens = chunk.usage.completion_tokens
    if getattr(chunk, "type", None) == "diffusion_frame":
        answer.num_steps += 1
        answer.num_canvases = max(answer.num_canvases, chunk.block + 1)
        display.frame(chunk, answer)
        return
    for choice in chunk.choices:
        answer.finish_reason = choice.finish_reason or answer.finish_reason
        if piece := printable(choice.delta.content or ""):
            answer.text += piece
            display.emitted(piece, answer)


def first_model(client: OpenAI) -> str:
    """Return the name of a server's first model.

    Raises:
        AnswerError: If the server cannot be reached.
    """
    try:
        return client.models.list().data[0].id
    except Exception as error:
        raise AnswerError(reason(error)) from error


def folder_of(client: OpenAI, model: str) -> str:
    """Return the folder or the name that a server has a model from, or an empty string if it names
    none.
    """
    from openai import OpenAIError

    try:
        cards = client.models.list().data
    except OpenAIError:
        return ""
    roots = (getattr(card, "root", None) for card in cards if card.id == model)
    return str(next(roots, None) or "")


def reason(error: Exception) -> str:
    """Describe in one sentence what went wrong between this process and the server."""
    from openai import (
        APIConnectionError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        NotFoundError,
    )

    if isinstance(error, APITimeoutError):
        return f"The server said nothing for {ANSWER_SECONDS:.0f} s."
    if isinstance(error, APIConnectionError):
        return f"The server cannot be reached at {error.request.url.host}:{error.request.url.port}."
    if isinstance(error, AuthenticationError):
        return "The server does not take this key; set --api-key or VLLM_API_KEY to its own."
    if isinstance(error, NotFoundError):
        return f"The server does not have this model: {_message(error)}"
    if isinstance(error, APIStatusError):
        return f"The server refused the request: {_message(error)}"
    if _is_sent(error):
        # vLLM's status of an error that it sends after the head of a stream.
        code = getattr(error, "body", {}).get("code")
        did = "refused the request" if str(code).startswith("4") else "failed in mid-answer"
        return f"The server {did}: {_message(error)}"
    return f"The server did not answer to the end: {error or type(error).__name__}"


def _is_sent(error: Exception) -> bool:
    """Return whether a server sent the error, as an object of the OpenAI API."""
    return isinstance(getattr(error, "body", None), dict)


def _message(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return printable(str(body.get("message") or error.message))


def display_for(out: TextIO, *, plain: bool = False) -> PlainDisplay | LiveDisplay:
    """Choose canvases for a terminal that can draw them, and plain text for anything else."""
    can_draw = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return LiveDisplay(out) if can_draw and not plain else PlainDisplay(out)


class PlainDisplay:
    """Text as it is emitted, and nothing else.

    The answer arrives while a display is open as a context.
    """

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

    def emitted(self, piece: str, answer: Answer) -> None:
        """Show text that will not change any more; ``answer`` holds it already."""
        self._out.write(piece)
        self._out.flush()
        self._ends_line = piece.endswith("\n")

    def frame(self, frame: Any, answer: Answer) -> None:
        """Ignore the frame; a server sends none where canvases are not drawn."""


class LiveDisplay:
    """Emitted text, the canvas with its kept tokens plain and the rest dim, and a line of
    figures.
    """

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

    def emitted(self, piece: str, answer: Answer) -> None:
        self.frame(None, answer)

    def frame(self, frame: Any, answer: Answer) -> None:
        """Show a canvas as it stands after a step, from a chunk of the server."""
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
        # A thought comes before the text; it is not part of the answer.
        rest = (getattr(frame, "reasoning", None) or "") + frame.text
        for token, is_kept in zip(frame.tokens, frame.kept, strict=True):
            # Special tokens, what an end throws away and parts of characters are not text by
            # themselves.
            if token and rest.startswith(token):
                drawing.append(printable(token), style="" if is_kept else "dim")
                rest = rest[len(token) :]
        drawing.append(printable(rest), style="dim")
        again = ", begun anew" if frame.begins_anew else ""
        # A constraint may take a step past the cap.
        past = frame.step - frame.total
        cap = f", {past} past the cap of" if past > 0 else " of at most"
        drawing.append(
            f"\ncanvas {frame.block + 1}, step {frame.step}{cap} {frame.total}{again}",
            style="italic dim",
        )
        return drawing


def count(number: float, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun, whose plural ends in ``s`` unless another one is given."""
    return f"{number:.0f} {singular if number == 1 else plural or singular + 's'}"


def figures(answer: Answer) -> str:
    """Describe in one line what an answer took, without what is not known."""
    parts = []
    if answer.num_steps:
        steps = count(answer.num_steps, "step")
        parts.append(f"{steps} on {count(answer.num_canvases, 'canvas', 'canvases')}")
    if answer.num_steps and answer.num_tokens:
        parts.append(f"{answer.num_tokens / answer.num_steps:.1f} tokens a step")
    if answer.seconds and answer.num_tokens:
        parts.append(f"{answer.num_tokens / answer.seconds:.1f} tokens a second")
    return ", ".join(parts)
