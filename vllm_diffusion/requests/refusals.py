"""Refusals of requests: an HTTP 400 that names the field, where a client looks for it, and one line in the log.

vLLM checks sampling parameters when a stream's first output is requested. It logs each refusal with its
stack trace, by which a client could fill a disk, and cuts a stream of ``/v1/responses`` without a word.
"""

from __future__ import annotations

import logging
import reprlib
import time
import traceback
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.requests.greedy_filters import note_filters


def refuse(field: str, reason: str, value: Any = None) -> NoReturn:
    """Refuse a request.

    Args:
        field: Name of the field that the refusal is about.
        reason: What is wrong and the remedy, the rest of a sentence that begins with the field.
        value: The client's value, which the message ends with; ``None`` if it does not.

    Raises:
        VLLMValidationError: Always; the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(f"{field} {reason}", parameter=field, value=value)


# Of vLLM's protocols: it takes ``structured_outputs`` for a mapping before anything has checked it.
_COUNTS_CONSTRAINTS = (
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.check_structured_outputs_count"
)


def install() -> None:
    """Name the field of refusals in which vLLM only begins its sentence with it, and shorten its log.

    vLLM checks sampling parameters where they are made, before it is known which model they are
    for. So this is put in place in a process that configures a diffusion model, and in no other.
    Safe to call twice.
    """
    _naming_fields.install()
    _refusing_what_is_no_mapping.install()
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, OneLineRefusals) for each in logger.filters):
            logger.addFilter(OneLineRefusals())


@replaces_call(
    "vllm.entrypoints.serve.exception_handling.handlers.exception:create_error_response",
    reason="structured_outputs that is no mapping is a 400, where the protocol's check makes it a 500.",
    until="CompletionRequest.check_structured_outputs_count refuses what is no mapping.",
)
def _refusing_what_is_no_mapping(stock: Any, error: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer an exception as vLLM does, but one from reading the keys of ``structured_outputs`` with a 400."""
    from vllm.exceptions import VLLMValidationError

    if isinstance(error, AttributeError):
        functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
        if _COUNTS_CONSTRAINTS.rpartition(".")[2] in functions:
            error = VLLMValidationError(
                'structured_outputs must be an object, such as {"regex": "[a-z]+"}.',
                parameter="structured_outputs",
            )
    return stock(error, *args, **kwargs)


@replaces_call(
    "vllm.sampling_params:SamplingParams._verify_args",
    reason="Names the field of a refusal that names it in words only, and notes the filters of temperature 0, which "
    "are erased after this check.",
    until="SamplingParams raises its refusals with their parameter, and keeps its filters at temperature 0.",
)
def _naming_fields(stock_check: Any, self: Any) -> None:
    """Check each parameter by itself, as vLLM does, and note filters that it erases next."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    try:
        stock_check(self)
    except VLLMValidationError as error:
        message = str(error.args[0])
        field = message.partition(" ")[0]
        if error.parameter is not None or field not in SamplingParams.__struct_fields__:
            raise
        value = getattr(self, field)
        raise VLLMValidationError(message, parameter=field, value=value) from None
    note_filters(self)


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
