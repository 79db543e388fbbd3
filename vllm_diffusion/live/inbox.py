"""Where frames wait for whoever watches, within one API process.

An inbox is opened around the call that adds a request to vLLM's output processor, which finds it in
the context of that call: no name that a client chooses leads from one request to another's frames.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap

# Of one call. Whoever reads more slowly than canvases are denoised misses the oldest ones.
MOST_WAITING_FRAMES = 64
# Of one call: its prompts times n.
MOST_WATCHED_ANSWERS = 16


class Inbox:
    """Frames and step maps of one call's requests, in order."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.num_answers = 0
        self._prompt_index = {name: index for index, name in enumerate(request_ids)}
        self._frames: deque[CanvasFrame] = deque(maxlen=MOST_WAITING_FRAMES)
        self._step_maps: deque[CanvasStepMap] = deque()
        self._filled = asyncio.Event()

    def prompt_index(self, request_id: str) -> int:
        """Of a request, by the name that its caller gave it."""
        return self._prompt_index.setdefault(request_id, len(self._prompt_index))

    def put(self, event: CanvasFrame | CanvasStepMap) -> None:
        """Add one; a frame may push out the oldest."""
        if isinstance(event, CanvasFrame):
            self._frames.append(event)
        else:
            self._step_maps.append(event)
        self._filled.set()

    async def wait(self) -> None:
        """Until there is something."""
        await self._filled.wait()

    def take(self) -> list[CanvasFrame | CanvasStepMap]:
        """All that is there."""
        self._filled.clear()
        events: list[CanvasFrame | CanvasStepMap] = [*self._frames, *self._step_maps]
        self._frames.clear()
        self._step_maps.clear()
        return events


_inbox: ContextVar[Inbox | None] = ContextVar("inbox", default=None)


@contextmanager
def opened(request_ids: Sequence[str] = ()) -> Iterator[Inbox]:
    """An inbox for the requests that are added within.

    Args:
        request_ids: One for each prompt, in order; others are numbered as they come.
    """
    inbox = Inbox(request_ids)
    token = _inbox.set(inbox)
    try:
        yield inbox
    finally:
        _inbox.reset(token)


def open_inbox() -> Inbox | None:
    """That of the call that is under way."""
    return _inbox.get()
