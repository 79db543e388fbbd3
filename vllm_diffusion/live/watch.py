"""Frames for users of ``vllm.LLM`` and of ``AsyncLLM``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap
from vllm_diffusion.live.inbox import opened

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

T = TypeVar("T")

# What the tokens of a canvas are given to come before the frames of the next one.
_TOKENS_SECONDS = 0.05


def watch(
    llm: LLM, enqueue: Callable[[], object]
) -> Iterator[CanvasFrame | CanvasStepMap | RequestOutput]:
    """Run requests, and yield their canvases as they are denoised, and each answer when it is done.

    >>> params = SamplingParams(extra_args={"diffusion_frames": 1})
    >>> for event in watch(llm, lambda: llm.enqueue_chat(messages, params)):
    ...     print(event.text if isinstance(event, CanvasFrame) else event)

    Args:
        llm: Of vLLM.
        enqueue: Adds requests to it, with ``LLM.enqueue`` or ``LLM.enqueue_chat``. Those whose
            ``SamplingParams.extra_args`` hold ``diffusion_frames`` are shown.
    """
    with opened() as inbox:
        enqueue()
    engine = llm.llm_engine
    while engine.has_unfinished_requests():
        outputs = engine.step()
        yield from inbox.take()
        yield from (output for output in outputs if output.finished)


async def watch_async(
    outputs: AsyncIterator[T], request_ids: Sequence[str] = ()
) -> AsyncIterator[CanvasFrame | CanvasStepMap | T]:
    """What an iterator yields, and the canvases of the requests behind it as they are denoised.

    >>> params = SamplingParams(output_kind=RequestOutputKind.DELTA,
    ...                         extra_args={"diffusion_frames": 1})
    >>> async for event in watch_async(engine.generate(prompt, params, request_id)):
    ...     print(event.text if isinstance(event, CanvasFrame) else event.outputs[0].text)

    Frames of a canvas come before its tokens, and those of the next one behind them. They wait for a
    slow reader, but no more than 64: then the oldest is dropped. Tokens never are.

    Args:
        outputs: ``AsyncLLM.generate(...)``, or what is made of such, not begun yet.
        request_ids: One for each prompt, by which frames are numbered.
    """
    with opened(request_ids) as inbox:
        following = asyncio.ensure_future(anext(outputs))
    arrived = asyncio.ensure_future(inbox.wait())
    order = _Order()
    try:
        while True:
            if was_held := order.is_held:
                # The tokens of the canvas before were told first, and are on their way; or a parser
                # withholds them.
                await asyncio.wait({following}, timeout=_TOKENS_SECONDS)
            else:
                await asyncio.wait({following, arrived}, return_when=asyncio.FIRST_COMPLETED)
                order.add(inbox.take())
                for event in order.take():
                    yield event
            if arrived.done():
                arrived = asyncio.ensure_future(inbox.wait())
            if following.done():
                try:
                    output = following.result()
                except StopAsyncIteration:
                    for event in order.rest():
                        yield event
                    return
                yield output
                following = asyncio.ensure_future(anext(outputs))
            if was_held:
                order.release()
                for event in order.take():
                    yield event
    finally:
        # Whoever stops watching stops the requests, as with the iterator alone.
        arrived.cancel()
        if not following.cancel() and not following.cancelled():
            following.exception()
        await asyncio.wait({following})
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()


class _Order:
    """Holds the events of an answer's next canvas until the tokens of the one before had their time."""

    def __init__(self) -> None:
        self._waiting: deque[CanvasFrame | CanvasStepMap] = deque()
        self._block: dict[tuple[int, int], int] = {}

    def add(self, events: list[CanvasFrame | CanvasStepMap]) -> None:
        """As they were told."""
        self._waiting.extend(events)

    @property
    def is_held(self) -> bool:
        """Whether the next event begins a canvas."""
        if not self._waiting:
            return False
        event = self._waiting[0]
        return self._block.get((event.prompt_index, event.index), event.block) < event.block

    def release(self) -> None:
        """Let the canvas begin."""
        event = self._waiting[0]
        self._block[event.prompt_index, event.index] = event.block

    def rest(self) -> list[CanvasFrame | CanvasStepMap]:
        """What still waits when no tokens follow."""
        return list(self._waiting)

    def take(self) -> Iterator[CanvasFrame | CanvasStepMap]:
        """Events up to the next canvas."""
        while self._waiting and not self.is_held:
            self.release()
            yield self._waiting.popleft()
