"""Frames on their way to whoever watches: in order, bounded, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from vllm_diffusion.live import CanvasFrame, CanvasStepMap, watch_async
from vllm_diffusion.live.inbox import MOST_WAITING_FRAMES, Inbox, open_inbox, opened


def frame(step: int, block: int = 0, index: int = 0) -> CanvasFrame:
    return CanvasFrame(
        index=index,
        prompt_index=0,
        block=block,
        step=step,
        total=1000,
        offset=0,
        text="",
        is_last=False,
        begins_anew=False,
    )


def test_slow_reader_misses_frames_and_no_step_map() -> None:
    """Of many frames the newest are left; step maps all are."""
    inbox = Inbox([])
    for step in range(1, 1001):
        inbox.put(frame(step))
        if step % 100 == 0:
            inbox.put(CanvasStepMap(0, 0, step // 100, (1,)))
    taken = inbox.take()
    steps = [event.step for event in taken if isinstance(event, CanvasFrame)]
    assert steps == list(range(1001 - MOST_WAITING_FRAMES, 1001))
    assert sum(isinstance(event, CanvasStepMap) for event in taken) == 10
    assert inbox.take() == []


def test_prompts_are_numbered_as_they_were_named() -> None:
    """By name where the caller knows names, else as they come."""
    named = Inbox(["b", "a"])
    assert [named.prompt_index(name) for name in ("a", "b", "c")] == [1, 0, 2]


def test_an_inbox_is_its_call_alone() -> None:
    """A request that another task adds meanwhile does not find it."""

    async def adds() -> Inbox | None:
        await asyncio.sleep(0)
        return open_inbox()

    async def run() -> None:
        other = asyncio.ensure_future(adds())
        with opened() as inbox:
            mine = asyncio.ensure_future(adds())
        assert await mine is inbox
        assert await other is None
        assert open_inbox() is None

    asyncio.run(run())


async def outputs(log: list[str]) -> AsyncGenerator[str, None]:
    """An engine's: it finds the inbox when it begins, and puts frames before each output."""
    inbox = open_inbox()
    assert inbox is not None
    try:
        for i in range(3):
            for step in (1, 2):
                await asyncio.sleep(0.001)
                inbox.put(frame(10 * i + step))
            yield f"output {i}"
    finally:
        log.append("closed")


def test_frames_come_before_their_tokens() -> None:
    """And the iterator ends when the outputs do."""

    async def run() -> list[object]:
        return [
            event.step if isinstance(event, CanvasFrame) else event
            async for event in watch_async(outputs([]))
        ]

    events = asyncio.run(run())
    assert events == [1, 2, "output 0", 11, 12, "output 1", 21, 22, "output 2"]


def test_tokens_come_before_the_next_canvas() -> None:
    """Also where they take longer on their way than its first frames; those of others go on."""

    async def late() -> AsyncGenerator[str, None]:
        inbox = open_inbox()
        assert inbox is not None
        for block in range(3):
            inbox.put(frame(1, block))
            inbox.put(frame(2, block))
            inbox.put(frame(1, block + 1))
            for _ in range(10):
                await asyncio.sleep(0)
            yield f"output {block}"

    async def run() -> list[object]:
        return [
            (event.block, event.step) if isinstance(event, CanvasFrame) else event
            async for event in watch_async(late())
        ]

    events = asyncio.run(run())
    for block in range(3):
        place = events.index(f"output {block}")
        assert all(e[0] <= block for e in events[:place] if isinstance(e, tuple))
        assert all(e[0] > block for e in events[place:] if isinstance(e, tuple))


def test_withheld_tokens_hold_frames_for_a_moment() -> None:
    """A parser may say nothing of a canvas: what follows is shown all the same."""

    async def silent() -> AsyncGenerator[str, None]:
        inbox = open_inbox()
        assert inbox is not None
        for block in range(3):
            inbox.put(frame(1, block))
        await asyncio.sleep(1.0)
        yield "all"

    async def run() -> list[object]:
        return [
            event.block if isinstance(event, CanvasFrame) else event
            async for event in watch_async(silent())
        ]

    assert asyncio.run(run()) == [0, 1, 2, "all"]


def test_whoever_stops_watching_stops_the_request() -> None:
    """As with the outputs alone: their iterator is closed."""

    async def run() -> list[str]:
        log: list[str] = []
        watching = watch_async(outputs(log))
        async for _ in watching:
            break
        await watching.aclose()
        return log

    assert asyncio.run(run()) == ["closed"]


def test_an_error_is_raised() -> None:
    """What goes wrong reaches whoever watches."""

    async def failing() -> AsyncGenerator[str, None]:
        yield "one"
        raise ValueError("gone")

    async def run() -> None:
        async for _ in watch_async(failing()):
            pass

    with pytest.raises(ValueError, match="gone"):
        asyncio.run(run())
