"""Refusals that come after a stream has begun: one line in the log, and an event for the client.

vLLM checks sampling parameters when a stream's first output is asked for. It logs each refusal with its
stack trace, by which a client could fill a disk, and cuts a stream of ``/v1/responses`` without a word.
"""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import AsyncGenerator
from typing import Any

# vLLM's modules that log what ends a stream.
_LOGGERS = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
)
# At most one line in so many seconds, from each of them.
SECONDS_A_LINE = 10.0


class OneLineRefusals(logging.Filter):
    """A filter that logs a refused stream in one line without a trace, and no more than one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._next_line = 0.0
        self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass what is no refusal as it is; shorten or drop a refusal."""
        from vllm.exceptions import VLLMClientError

        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, VLLMClientError):
            return True
        now = time.monotonic()
        if now < self._next_line:
            self._num_left_out += 1
            return False
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "A streamed request was refused: %s (%d others since the last such line)"
        # What a client sent is quoted, so that it is one line however it is written.
        record.args = (_quote(str(error)), self._num_left_out)
        record.exc_info = record.exc_text = None
        self._next_line, self._num_left_out = now + SECONDS_A_LINE, 0
        return True


def _quote(message: str) -> str:
    shortener = reprlib.Repr()
    shortener.maxstring = 300
    return shortener.repr(message)


def install() -> None:
    """Shorten vLLM's log of refused streams in this process. Safe to call twice."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, OneLineRefusals) for each in logger.filters):
            logger.addFilter(OneLineRefusals())


async def ending_with_refusal(events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the events of a stream of ``/v1/responses``, and the event of a refusal that ends it.

    Args:
        events: vLLM's events.
    """
    from openai.types.responses import ResponseErrorEvent
    from vllm.exceptions import VLLMClientError

    num_events = 0
    try:
        async for event in events:
            num_events += 1
            yield event
    except VLLMClientError as error:
        yield ResponseErrorEvent(
            type="error",
            code="BadRequestError",
            message=str(error),
            param=getattr(error, "parameter", None),
            sequence_number=num_events,
        )
    finally:
        await events.aclose()
