"""Refusals of requests: an HTTP 400 that names the field, where a client looks for it, and one line
in the log.

vLLM checks sampling parameters when a stream's first output is requested; here they are checked
before it begins (``endpoints.py``). What is still refused within a stream vLLM logs with its stack
trace, by which a client could fill a disk, and cuts a stream of ``/v1/responses`` without a word.
"""

import contextlib
import logging
import reprlib
import time
from collections.abc import AsyncGenerator, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.requests.greedy_filters import note_filters

# Field of ``SamplingParams`` that holds a constraint.
CONSTRAINT = "structured_outputs"
# Field in which the client of this request has sent its constraint, which all endpoints hand on
# under one name.
_constrained_by: ContextVar[str] = ContextVar("constrained_by")


def note_constraint(field: str) -> None:
    """Have refusals of this request's constraint name the client's own field."""
    _constrained_by.set(field)


def clients_name(field: str) -> str:
    """Return the name that the client has for a field."""
    return _constrained_by.get(field) if field == CONSTRAINT else field


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

    name = clients_name(field)
    # Whoever asks without a body may have it from there.
    where = " (response_format, tools)" if name == CONSTRAINT else ""
    space = "" if reason.startswith(":") else " "
    raise VLLMValidationError(f"{name}{where}{space}{reason}", parameter=name, value=value)


@contextlib.contextmanager
def failing_aloud() -> Iterator[None]:
    """Have whatever else than a refusal is raised answered with a message, and leave its trace in
    the log.

    vLLM makes it a 500 without a message, and logs nothing.
    """
    from vllm.exceptions import GenerationError, VLLMError

    try:
        yield
    except VLLMError:
        raise
    except Exception as error:
        logging.getLogger(f"vllm.{__name__}").exception("A request could not be checked.")
        message = f"The request could not be checked ({type(error).__name__}: {error}); the server's log has more."
        raise GenerationError(message) from error


def install() -> None:
    """Name the field of refusals in which vLLM only begins its sentence with it, and shorten its
    log.

    vLLM checks sampling parameters where they are made, before it is known which model they are
    for. So this is put in place in a process that configures a diffusion model, and in no other.
    Safe to call twice.
    """
    _naming_fields.install()
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, OneLineRefusals) for each in logger.filters):
            logger.addFilter(OneLineRefusals())


@replaces_call(
    "vllm.sampling_params:SamplingParams._verify_args",
    reason="Names the field of a refusal that names it in words only, and notes the filters of temperature 0, which "
    "are erased after this check.",
    until="SamplingParams raises its refusals with their parameter, and keeps its filters at temperature 0.",
)
def _naming_fields(stock_check: Any, self: Any) -> None:
    """Check each parameter by itself, as vLLM does, and note filters that it erases next."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams, SamplingType

    try:
        stock_check(self)
    except VLLMValidationError as error:
        message = str(error.args[0])
        field = error.parameter or message.partition(" ")[0]
        if field == "max_tokens" and self.max_tokens == 0:
            message += " A prompt that fills the model's length leaves none: shorten it, or raise --max-model-len."
        elif error.parameter is not None or field not in SamplingParams.__struct_fields__:
            raise
        value = getattr(self, field)
        raise VLLMValidationError(message, parameter=field, value=value) from None
    if self.n > 1 and self.sampling_type == SamplingType.GREEDY:
        # vLLM refuses it next, and names no field.
        refuse(
            "n", f"must be 1 at temperature 0, where all answers are equal; got {self.n}.", self.n
        )
    note_filters(self)


# vLLM's modules that log what ends a stream, or a message.
_LOGGERS = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.anthropic.api_router",
)
# At most one line in so many seconds, from each of them.
SECONDS_A_LINE = 10.0


class OneLineRefusals(logging.Filter):
    """A filter that logs a refused stream in one line without a trace, and no more than one at a
    time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next_line = 0.0
        self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass what is not a refusal as it is; shorten or drop a refusal."""
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
        record.args = (one_line(str(error)), self._num_left_out)
        record.exc_info = record.exc_text = None
        self._next_line, self._num_left_out = now + SECONDS_A_LINE, 0
        return True


def one_line(message: str) -> str:
    """Quote what a client may have written, so that it is one short line however it is written."""
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
