"""Frames for users of ``vllm.LLM`` and of ``AsyncLLM``, and the queue in which they wait for their
reader.

An inbox is opened around the call that adds a request to vLLM's output processor, which finds it in
the context of that call: no name that a client chooses leads from one request to another's frames.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

    Item: TypeAlias = CanvasFrame | CanvasStepMap | RequestOutput

# Frames of one call that wait. A reader slower than the denoising misses the oldest ones.
MOST_WAITING_FRAMES = 64


class Inbox:
    """Frames, step maps and, of an ``AsyncLLM``, outputs of one call's requests, in order.

    Attributes:
        num_answers: Answers that the call requested so far.
        prompts: Token ids of each prompt, by its place in the call; none where it was embeddings.
    """

    def __init__(self, request_ids: Sequence[str] = ()) -> None:
        """Number the call's requests.

        Args:
            request_ids: One for each prompt, in order; others are numbered as they come.
        """
        self.num_answers = 0
        self.prompts: dict[int, list[int]] = {}
        self._prompt_index = {name: index for index, name in enumerate(request_ids)}
        self._items: deque[Item] = deque()
        self._num_frames = 0

    def prompt_index(self, request_id: str) -> int:
        """Return the place of a request's prompt in the call.

        Args:
            request_id: The name that the caller gave the request.
        """
        return self._prompt_index.setdefault(request_id, len(self._prompt_index))

    def put(self, item: Item) -> None:
        """Add an item; a frame too many pushes out the oldest frame."""
        if isinstance(item, CanvasFrame):
            if self._num_frames == MOST_WAITING_FRAMES:
                oldest = (i for i, old in enumerate(self._items) if isinstance(old, CanvasFrame))
                del self._items[next(oldest)]
            else:
                self._num_frames += 1
        self._items.append(item)

    def take(self) -> list[Item]:
        """Remove and return all items."""
        items = list(self._items)
        self._items.clear()
        self._num_frames = 0
        return items


class OrderedQueue:
    """Takes the place of vLLM's collector where its output processor puts a watched request's
    outputs.

    The collector merges outputs that its reader has not taken yet, so that nobody could say which
    of their tokens came before a frame. Here the outputs wait in the inbox, and the collector
    receives empty ones, which wake the reader and may be merged.
    """

    def __init__(self, collector: Any, inbox: Inbox) -> None:
        self._collector = collector
        self._inbox = inbox

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output to the inbox; an error goes to the collector, which raises it."""
        if isinstance(output, Exception):
            self._collector.put(output)
            return
        self._inbox.put(output)
        self.wake(is_finished=output.finished)

    def wake(self, *, is_finished: bool = False) -> None:
        """Wake the collector's reader, so that it reads the inbox.

        Args:
            is_finished: True if nothing follows.
        """
        from vllm import RequestOutput

        self._collector.put(
            RequestOutput(
                request_id=self._collector.request_id,
                prompt=None,
                prompt_token_ids=None,
                prompt_logprobs=None,
                outputs=[],
                finished=is_finished,
            )
        )


_inbox: ContextVar[Inbox | None] = ContextVar("inbox", default=None)


@contextmanager
def opened(inbox: Inbox) -> Iterator[None]:
    """Have the requests that are added within use the inbox."""
    token = _inbox.set(inbox)
    try:
        yield
    finally:
        _inbox.reset(token)


def open_inbox() -> Inbox | None:
    """Return the inbox of the call that is under way."""
    return _inbox.get()


def watch(
    llm: LLM, enqueue: Callable[[], object]
) -> Iterator[CanvasFrame | CanvasStepMap | RequestOutput]:
    """Run requests, and yield their canvases as they are denoised, and each answer when it is done.

    >>> params = SamplingParams(extra_args={"diffusion_frames": 1})
    >>> for event in watch(llm, lambda: llm.enqueue_chat(messages, params)):
    ...     print(event.text if isinstance(event, CanvasFrame) else event)

    Args:
        llm: The engine.
        enqueue: Adds requests to it, with ``LLM.enqueue`` or ``LLM.enqueue_chat``. Requests whose
            ``SamplingParams.extra_args`` hold ``diffusion_frames`` are shown.
    """
    inbox = Inbox()
    with opened(inbox):
        enqueue()
    engine = llm.llm_engine
    while engine.has_unfinished_requests():
        outputs = engine.step()
        yield from inbox.take()
        yield from (output for output in outputs if output.finished)


def watch_async(
    outputs: AsyncGenerator[Any, None], request_ids: Sequence[str] = ()
) -> AsyncGenerator[CanvasFrame | CanvasStepMap | RequestOutput, None]:
    """Return an iterator of requests' outputs, and between them their canvases as they are
    denoised.

    >>> params = SamplingParams(output_kind=RequestOutputKind.DELTA,
    ...                         extra_args={"diffusion_frames": 1})
    >>> async for event in watch_async(engine.generate(prompt, params, request_id)):
    ...     print(event.text if isinstance(event, CanvasFrame) else event.outputs[0].text)

    Frames of a canvas come before its tokens, and the next canvas's frames after them. They wait
    for a slow reader, but no more than 64: then the oldest is dropped. Tokens never are.

    Args:
        outputs: ``AsyncLLM.generate(...)``, or several of them merged by vLLM, not begun yet.
        request_ids: One for each prompt, by which frames are numbered.
    """
    return items_of(outputs, Inbox(request_ids))


async def items_of(outputs: AsyncGenerator[Any, None], inbox: Inbox) -> AsyncGenerator[Any, None]:
    """Yield frames and outputs as :func:`watch_async` does, with an inbox of the caller.

    Args:
        outputs: Outputs of the engine, as in :func:`watch_async`.
        inbox: New inbox.
    """
    with opened(inbox):
        # The requests are added by the first step of the iterator, in this context.
        first = asyncio.ensure_future(anext(outputs, None))
    try:
        signal = await first
        while signal is not None:
            for item in inbox.take():
                yield item
            signal = await anext(outputs, None)
    finally:
        # Whoever stops watching stops the requests, as with the iterator alone.
        await outputs.aclose()
