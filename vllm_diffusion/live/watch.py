"""Frames for users of ``vllm.LLM`` and of ``AsyncLLM``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap
from vllm_diffusion.live.inbox import opened

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

T = TypeVar("T")


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

    Frames of a canvas come before its tokens. They wait for a slow reader, but no more than 64: then
    the oldest is dropped. Tokens never are.

    Args:
        outputs: ``AsyncLLM.generate(...)``, or what is made of such, not begun yet.
        request_ids: One for each prompt, by which frames are numbered.
    """
    with opened(request_ids) as inbox:
        following = asyncio.ensure_future(anext(outputs))
    arrived = asyncio.ensure_future(inbox.wait())
    try:
        while True:
            await asyncio.wait({following, arrived}, return_when=asyncio.FIRST_COMPLETED)
            is_there = following.done()
            for event in inbox.take():
                yield event
            if arrived.done():
                arrived = asyncio.ensure_future(inbox.wait())
            if is_there:
                try:
                    output = following.result()
                except StopAsyncIteration:
                    return
                yield output
                following = asyncio.ensure_future(anext(outputs))
    finally:
        # Whoever stops watching stops the requests, as with the iterator alone.
        arrived.cancel()
        if not following.cancel() and not following.cancelled():
            following.exception()
        await asyncio.wait({following})
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()
