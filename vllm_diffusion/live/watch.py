"""Frames for users of ``vllm.LLM`` and of ``AsyncLLM``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap
from vllm_diffusion.live.inbox import Inbox, opened

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


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
    """Return an iterator of requests' outputs, and between them their canvases as they are denoised.

    >>> params = SamplingParams(output_kind=RequestOutputKind.DELTA,
    ...                         extra_args={"diffusion_frames": 1})
    >>> async for event in watch_async(engine.generate(prompt, params, request_id)):
    ...     print(event.text if isinstance(event, CanvasFrame) else event.outputs[0].text)

    Frames of a canvas come before its tokens, and the next canvas's frames behind them. They wait for a
    slow reader, but no more than 64: then the oldest is dropped. Tokens never are.

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
