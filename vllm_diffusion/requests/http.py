"""The door of vLLM's OpenAI server for diffusion models: bodies, fields of every endpoint, and what
is refused.

A body passes, in this order: its length (:class:`BoundedBodies`), vLLM's protocol,
:func:`read_body` of its endpoint, and with its sampling parameters :class:`CheckedClient` and
``validation.py``. Whatever is refused on the way leaves one line in the log.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from PIL.Image import DecompressionBombError
from prometheus_client import Counter
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.logger import init_logger
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.requests import bounds
from vllm_diffusion.requests.arguments import PREFIX
from vllm_diffusion.requests.constraint import read_constraint_aside
from vllm_diffusion.requests.refusals import failing_aloud, one_line, refuse
from vllm_diffusion.requests.validation import giving_pictures_back
from vllm_diffusion.startup.plan import spec_of

logger = init_logger(f"vllm.{__name__}")

# Pictures and sound within JSON: what follows is not text of a prompt, and may be long.
_MEDIA = re.compile(rb'(?:;base64,|"data"\s*:\s*")[A-Za-z0-9+/=_\\-]+')
# Key in the scope of a request that is refused: an object that its error gets.
DETAILS = "vllm_diffusion.details"
# Of vLLM's protocols: it takes ``structured_outputs`` for a mapping before anything has checked it.
_COUNTS_CONSTRAINTS = "check_structured_outputs_count"
# Fields of vLLM's before 0.12, by the name that they have within ``structured_outputs``; ignored,
# they would give free answers. Clients for all releases (guidance) send both forms, of which vLLM
# reads its own.
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")} | {
    "guided_whitespace_pattern": "whitespace_pattern",
    "guided_decoding_backend": "",
}
# Fields that refusals are counted by; any further one is counted as another.
_MOST_COUNTED = 64
_counted: set[str] = set()


def install() -> None:
    """Put the door into servers of this process. Safe to call twice."""
    _with_door.install()
    _reading_instant.install()


@replaces_call(
    "vllm.entrypoints.openai.chat_completion.protocol:resolve_return_mm_kwargs_alias",
    reason='Clients of diffusion APIs send reasoning_effort "instant", which vLLM\'s protocol refuses; this function is '
    "given each chat's body before its fields are checked.",
    until='reasoning_effort may be "instant" in vLLM.',
)
def _reading_instant(stock: Any, body: Any) -> Any:
    """Read the reasoning effort "instant" as "none"."""
    if isinstance(body, dict) and body.get("reasoning_effort") == "instant":
        body = {**body, "reasoning_effort": "none"}
    return stock(body)


@replaces_call(
    "vllm.entrypoints.launchers.app:init_exception_handler",
    reason="Bodies are bounded before they are read, each refusal leaves a line in the log, a 500 has a message, and "
    "structured_outputs that is no mapping is a 400: the protocol's check makes it a 500.",
    until="vLLM reads VLLM_HTTP_MAX_REQUEST_BODY_SIZE and logs what it refuses.",
)
def _with_door(stock: Any, app: Any) -> None:
    stock(app)
    _refusals()
    # A handler of their own: what that of all others answers leaves a trace too.
    for kind in (AttributeError, DecompressionBombError):
        app.add_exception_handler(kind, app.exception_handlers[Exception])
    for kind, handler in [*app.exception_handlers.items()]:
        app.add_exception_handler(kind, _noted(handler))
    app.add_middleware(BoundedBodies)


def _noted(handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Have vLLM's answer to an exception leave a line in the log, or its trace if it is the
    server's own.
    """

    async def answer(request: Any, error: Exception) -> Any:
        if isinstance(error, AttributeError) and _is_no_mapping(error):
            error = VLLMValidationError(
                'structured_outputs must be an object, such as {"regex": "[a-z]+"}.',
                parameter="structured_outputs",
            )
        elif isinstance(error, DecompressionBombError):
            # For a picture that vLLM's own limit of pixels would refuse too.
            error = VLLMValidationError(f"image_url is too large: {error}", parameter="image_url")
        response = await handler(request, error)
        body = json.loads(getattr(response, "body", None) or b"{}")
        said = body.get("error") if isinstance(body, dict) else None
        if not isinstance(said, dict):
            # Of paths that there are not, and of sockets.
            return response
        path, status = request.url.path, response.status_code
        if status < HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.NOT_IMPLEMENTED:
            where, reason = said.get("param") or "-", one_line(str(said["message"]))
            logger.info("%s refused (%d, %s): %s", path, status, where, reason)
            _count_refusal(where, status)
            return response
        if not said["message"]:
            said["message"] = f"The server failed ({type(error).__name__}); its log has the cause."
            response = type(response)({"error": said}, status_code=status)
        # These have said why where they were raised.
        is_explained = isinstance(error, (GenerationError, EngineDeadError))
        trace = None if is_explained else error
        logger.error("%s failed (%d): %s", path, status, one_line(said["message"]), exc_info=trace)
        return response

    return answer


@functools.cache
def _refusals() -> Counter:
    return Counter(
        "vllm_diffusion:refused_requests", "Requests that were refused.", ["field", "status"]
    )


def _count_refusal(field: str, status: int) -> None:
    # A client chooses the names of arguments that there are not.
    if field in _counted or len(_counted) < _MOST_COUNTED:
        _counted.add(field)
    else:
        field = "other"
    _refusals().labels(field, str(int(status))).inc()


def _is_no_mapping(error: Exception) -> bool:
    return any(
        frame.f_code.co_name == _COUNTS_CONSTRAINTS
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


class BoundedBodies:
    """An ASGI application that refuses bodies by their length, before anything reads them.

    ``VLLM_HTTP_MAX_REQUEST_BODY_SIZE`` bounds a body, and a quarter of it what of a body is no
    picture or sound.
    """

    def __init__(self, app: Any) -> None:
        from vllm import envs

        self._app = app
        self._most = envs.VLLM_HTTP_MAX_REQUEST_BODY_SIZE
        self._most_text = self._most // 4

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request whose body is short enough; answer 413 to any other."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _with_details(scope, send)
        declared = dict(scope["headers"]).get(b"content-length", b"")
        length = int(declared) if declared.isdigit() else 0
        if declared and length <= self._most_text:
            await self._app(scope, receive, send)
            return
        body = b"" if length > self._most else await self._read(receive)
        refusal = _refusal(max(length, len(body)), self._most, "")
        if refusal is None and len(body) > self._most_text:
            num_media = await asyncio.to_thread(_media_bytes, body)
            refusal = _refusal(
                len(body) - num_media, self._most_text, " besides pictures and sound"
            )
        if refusal is None:
            await self._app(scope, _replaying(body, receive), send)
        else:
            await _refuse_body(refusal, scope, receive, send)

    async def _read(self, receive: Any) -> bytes:
        """Return a body, or as much of it as shows that it is too long."""
        body, more = bytearray(), True
        while more and len(body) <= self._most:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body)


def _replaying(body: bytes, receive: Any) -> Any:
    """Give a body that was read to whoever reads next, and then what follows it."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Any:
        return unread.pop() if unread else await receive()

    return next_message


def _with_details(scope: Any, send: Any) -> Any:
    """Send a refusal with the ``details`` that its endpoint has put into the scope, for which vLLM
    has no field.
    """
    started: list[Any] = []

    async def send_with_details(message: Any) -> None:
        if DETAILS not in scope:
            await send(message)
        elif message["type"] == "http.response.start":
            started.append(message)
        else:
            said = json.loads(message["body"])
            said["error"]["details"] = scope[DETAILS]
            body = json.dumps(said).encode()
            headers = [
                (name, value) for name, value in started[0]["headers"] if name != b"content-length"
            ]
            length = (b"content-length", str(len(body)).encode())
            await send({**started[0], "headers": [*headers, length]})
            await send({**message, "body": body})

    return send_with_details


def _media_bytes(body: bytes) -> int:
    return sum(match.end() - match.start() for match in _MEDIA.finditer(body))


def _refusal(length: int, most: int, what: str) -> str | None:
    """Return why a body of so many bytes is refused; ``None`` if it is not."""
    if length <= most:
        return None
    return (
        f"The body has {length} bytes{what}; up to {most} are taken. Send less at once, or start the server with a "
        "larger VLLM_HTTP_MAX_REQUEST_BODY_SIZE."
    )


async def _refuse_body(message: str, *asgi: Any) -> None:
    from starlette.responses import JSONResponse

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    error = {"message": message, "type": status.phrase, "param": "body", "code": status}
    logger.info("%s refused (%d, body): %s", asgi[0]["path"], status, message)
    _count_refusal("body", status)
    await JSONResponse({"error": error}, status_code=status)(*asgi)


def check_fields(request: Any) -> None:
    """Refuse a value, however deep in a body, that cannot be sent to the engine's process or
    written as text.

    Args:
        request: Body of a request, as vLLM's protocol read it.

    Raises:
        VLLMValidationError: Naming the body's field.
    """
    for field, value in bounds.members(request):
        if problem := bounds.unsendable(value):
            refuse(str(field), problem)


def read_body(request: Any, model_config: Any, unknown: Mapping[str, Any] | None = None) -> None:
    """Read the fields that every endpoint has from this package, and refuse what would be ignored.

    Args:
        request: Body of a request, as vLLM's protocol read it; its ``vllm_xargs`` get the arguments
            of ours that stand at its top.
        model_config: vLLM's ``ModelConfig``.
        unknown: All fields of the body; ``None`` where the protocol keeps those that it does not
            know.

    Raises:
        VLLMValidationError: Naming the field.
    """
    _check_lengths(request, model_config)
    check_fields(request)
    fields = (request.model_extra or {}) if unknown is None else unknown
    is_constrained = getattr(request, "structured_outputs", None) is not None
    for name in fields.keys() & _GUIDED.keys():
        if fields[name] is not None and not is_constrained:
            where = (
                f"structured_outputs.{_GUIDED[name]}" if _GUIDED[name] else "no field: leave it out"
            )
            refuse(name, f"is a field of older releases of vLLM; here it is {where}.")
    if getattr(request, "use_beam_search", False) and model_config.is_diffusion:
        refuse(
            "use_beam_search",
            "is not supported for diffusion models, which do not write token after token; leave it out.",
        )
    arguments = {name: value for name, value in fields.items() if name.startswith(PREFIX)}
    if suffix := getattr(request, "suffix", None) or fields.get("suffix"):
        arguments |= _suffix_arguments(request, suffix, model_config)
    # An answer token after token starts from nothing: there the field is a hint that helps nobody,
    # as in vLLM.
    if (prediction := fields.get("prediction")) is not None and (spec := spec_of(model_config)):
        if reason := spec.refused_arguments.get("prediction"):
            refuse("prediction", reason)
        if not isinstance(prediction, Mapping):
            refuse("prediction", 'must be an object, {"type": "content", "content": ...}.')
        if "vllm_xargs" in type(request).model_fields:
            arguments["diffusion_prediction"] = prediction
    if arguments:
        if "vllm_xargs" not in type(request).model_fields:
            name = next(iter(arguments))
            refuse(
                name, "is not taken by this endpoint; ask /v1/chat/completions or /v1/completions."
            )
        request.vllm_xargs = {**arguments, **(request.vllm_xargs or {})}


def _suffix_arguments(request: Any, suffix: Any, model_config: Any) -> dict[str, Any]:
    """Return the argument for a suffix of the completions' endpoint, which
    :class:`SuffixesInCanvases` leaves out of the prompt.
    """
    if "suffix" not in type(request).model_fields:
        refuse(
            "suffix",
            "is a field of /v1/completions; a chat goes on after its last message. Leave it out.",
        )
    spec = spec_of(model_config)
    if spec is None:
        return {}
    if reason := spec.refused_arguments.get("suffix"):
        refuse("suffix", reason)
    return {"diffusion_suffix": suffix}


class SuffixesInCanvases(BaseRenderer):
    """Base of a server's renderer: a suffix stands in the canvas after the answer, and not in the
    prompt.
    """

    def render_completion_suffix(self, prompt: str, suffix: str) -> str | None:
        return prompt


def check_characters(request: Any, most: int) -> None:
    """Refuse text of which no prompt could be made, before it is made tokens.

    Args:
        request: Body of ``/tokenize``.
        most: Characters of the longest prompt, at as many a token as the tokenizer has.

    Raises:
        VLLMValidationError: Naming the field.
    """
    contents = [message.get("content") for message in getattr(request, "messages", None) or ()]
    lengths = {
        "prompt": len(getattr(request, "prompt", "")),
        "messages": sum(len(content) for content in contents if isinstance(content, str)),
    }
    for field, length in lengths.items():
        if length > most:
            refuse(
                field,
                f"has {length} characters; the longest prompt of this model has {most}. Send less.",
            )


def _check_lengths(request: Any, model_config: Any) -> None:
    """Refuse lists by their lengths, before anything reads their items."""
    prompt = getattr(request, "prompt", None)
    chats = getattr(request, "messages", None)
    num_prompts = 1
    if isinstance(prompt, list) and prompt:
        if not isinstance(prompt[0], int):
            num_prompts = len(prompt)
        most, longest = (
            model_config.max_model_len,
            max(
                (
                    len(ids)
                    for ids in ([prompt] if num_prompts == 1 else prompt)
                    if isinstance(ids, list)
                ),
                default=0,
            ),
        )
        if longest > most and getattr(request, "truncate_prompt_tokens", None) is None:
            refuse("prompt", f"has {longest} tokens; this model takes {most}. Send fewer.")
    if isinstance(chats, list) and chats and isinstance(chats[0], list):
        num_prompts = len(chats)
    num_answers = num_prompts * (getattr(request, "n", None) or 1)
    if num_prompts > 1 and num_answers > bounds.MOST_ANSWERS:
        refuse(
            "n",
            f"asks for {num_answers} answers to {num_prompts} prompts; one body may ask for {bounds.MOST_ANSWERS}. Send "
            "several.",
        )


class CheckedClient(AsyncLLM):
    """vLLM's client of the engine, which has constraints read in a thread while the event loop
    serves others.
    """

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        constraint = getattr(params, "structured_outputs", None)
        with giving_pictures_back(self.renderer, prompt), failing_aloud():
            await read_constraint_aside(constraint, self.vllm_config.structured_outputs_config)
        return await super().add_request(request_id, prompt, params, *args, **kwargs)
