"""The door of vLLM's OpenAI server for diffusion models: bodies, fields of every endpoint, and what
is refused.

A body passes, in this order: what it may hold (:class:`BoundedBodies`), vLLM's protocol, which
``first_errors.py`` has stop at the first bad item of a list, :func:`read_body` of its endpoint,
with its text :class:`BoundedPrompts`, and with its sampling parameters ``client.py`` and
``validation.py``. Whatever is refused on the way leaves one line in the log.
"""

import asyncio
import functools
import json
import re
import secrets
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, get_args

import zmq
from PIL.Image import DecompressionBombError
from prometheus_client import Counter
from starlette.datastructures import MutableHeaders
from vllm import envs
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.logger import init_logger
from vllm.renderers import ReasoningEffort
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.requests import bounds, spellings
from vllm_diffusion.requests.arguments import PREFIX, PUBLISHED_NAMES
from vllm_diffusion.requests.bodies import BodyError, BodyReader, body_number, discarding
from vllm_diffusion.requests.first_errors import stop_at_first_errors
from vllm_diffusion.requests.pictures import note_prepared, serve_giving_back
from vllm_diffusion.requests.refusals import (
    CONSTRAINT,
    note_constraint,
    one_line,
    refuse,
)
from vllm_diffusion.requests.texts import predicted_text
from vllm_diffusion.startup.plan import spec_of

logger = init_logger(f"vllm.{__name__}")

# Pictures and sound within JSON: what follows is not text of a prompt, and may be long.
_MEDIA = re.compile(rb'(?:;base64,|"data"\s*:\s*")[A-Za-z0-9+/=_\\-]+')
# All of a body without escaped characters but what tells where its objects and lists begin, and
# its keys end.
_NO_STRUCTURE = bytes({*range(256)} - {*b'"{[:'})
# Key in the scope of a request that is refused: an object that its error gets.
DETAILS = "vllm_diffusion.details"
# Validator of vLLM's protocols that takes ``structured_outputs`` for a mapping unchecked.
_COUNTS_CONSTRAINTS = "check_structured_outputs_count"
_LARGER = ", or start the server with a larger VLLM_HTTP_MAX_REQUEST_BODY_SIZE"
_NOT_TAKEN = (
    "is not taken by this endpoint; ask /v1/chat/completions or /v1/completions, or leave it out."
)
# Fields that refusals are counted by, besides those of the server's protocols.
_known = {"-", "body", "diffusing", "extra_args", "image_url", "lora_path", "thread"}
_known |= {"prediction", *spellings.NAMES, *PUBLISHED_NAMES, *SamplingParams.__struct_fields__}


def install() -> None:
    """Put the door into servers of this process. Safe to call twice."""
    _with_door.install()
    _reading_instant.install()


@replaces_call(
    "vllm.entrypoints.openai.chat_completion.protocol:resolve_return_mm_kwargs_alias",
    "vllm.entrypoints.openai.responses.protocol:resolve_return_mm_kwargs_alias",
    reason='Clients of diffusion APIs send the reasoning effort "instant", which vLLM\'s protocols refuse; this function '
    "is given each body of a chat or response before its fields are checked.",
    until='A reasoning effort may be "instant" in vLLM.',
)
def _reading_instant(stock: Any, body: Any) -> Any:
    """Read the reasoning effort "instant" as "none", and name it where another one is refused."""
    if isinstance(body, dict):
        body = _with_known_effort(body, "reasoning_effort", "reasoning_effort")
        if isinstance(reasoning := body.get("reasoning"), dict):
            known = _with_known_effort(reasoning, "effort", "reasoning.effort")
            body = {**body, "reasoning": known}
    return stock(body)


def _with_known_effort(values: dict[str, Any], key: str, field: str) -> dict[str, Any]:
    effort, efforts = values.get(key), get_args(ReasoningEffort)
    if effort == "instant":
        return {**values, key: "none"}
    if isinstance(effort, str) and effort not in efforts:
        refuse(field, f"must be one of instant, {', '.join(efforts)}; got {one_line(effort)}.")
    return values


@replaces_call(
    "vllm.entrypoints.launchers.app:init_exception_handler",
    reason="Bodies are bounded before they are read and by their first errors, each refusal leaves a line in the log, "
    "a 500 has a message, and structured_outputs that is not a mapping is a 400: the protocol's check makes it a 500.",
    until="vLLM reads VLLM_HTTP_MAX_REQUEST_BODY_SIZE and logs what it refuses.",
)
def _with_door(stock: Any, app: Any) -> None:
    stock(app)
    _refusals()
    _serve_middles(app)
    know_fields(_fields_of_bodies(app))
    # A handler of their own: what that of all others answers leaves a trace too.
    for kind in (AttributeError, DecompressionBombError):
        app.add_exception_handler(kind, app.exception_handlers[Exception])
    for kind, handler in [*app.exception_handlers.items()]:
        app.add_exception_handler(kind, _noted(handler))
    stop_at_first_errors()
    _open_sending()
    app.add_middleware(BoundedBodies)


def _open_sending() -> None:
    """Open what pyzmq needs for large messages, such as those with pictures.

    It would open it for the first one, and end the process if clients have all descriptors then.
    """
    zmq.Frame(b" ", copy=False)


def _serve_middles(app: Any) -> None:
    """Serve ``/v1/completions`` under the name that several clients have for completions with a
    suffix.
    """
    for route in [*app.routes]:
        if getattr(route, "path", None) == "/v1/completions":
            app.add_api_route(
                "/v1/fim/completions",
                route.endpoint,
                methods=["POST"],
                dependencies=route.dependencies,
                name="create_fim_completion",
            )


def _fields_of_bodies(app: Any) -> Iterator[str]:
    """Find the names of the fields of each body that a server's routes read."""
    for route in app.routes:
        body = getattr(route, "body_field", None)
        annotation = None if body is None else body.field_info.annotation
        for protocol in (annotation, *get_args(annotation)):
            yield from getattr(protocol, "model_fields", ())


def know_fields(names: Iterable[str]) -> None:
    """Have refusals that name one of these fields counted by it."""
    _known.update(names)


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
            # An answer about an unknown path, or to a socket.
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
    # A client chooses the names of fields that there are not, and the places within one that is.
    name = field.removeprefix("body.").partition(".")[0].partition("[")[0]
    _refusals().labels(name if name in _known else "other", str(int(status))).inc()


def _is_no_mapping(error: Exception) -> bool:
    return any(
        frame.f_code.co_name == _COUNTS_CONSTRAINTS
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


class BoundedBodies:
    """An ASGI application that refuses bodies by what they hold, before anything reads them.

    ``VLLM_HTTP_MAX_REQUEST_BODY_SIZE`` bounds the bytes of a body, a quarter of it those that are
    not a picture or sound, ``bounds.MOST_OBJECTS`` the objects and lists of JSON, and
    ``bounds.MOST_KEYS`` its keys.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._most = envs.VLLM_HTTP_MAX_REQUEST_BODY_SIZE
        self._most_text = self._most // 4
        self._reader = BodyReader(self._most)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request if its body is within the limits; refuse it otherwise, unless the client
        has left.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _with_details(scope, send)
        try:
            body = await self._checked(dict(scope["headers"]), receive)
        except BodyError as refusal:
            await _refuse_body(refusal, scope, receive, send)
            return
        if body is not None:
            # Unlike those of the server's other processes, which share its engine.
            body_number.set(secrets.randbits(63))
            await serve_giving_back(self._app, scope, _replaying(body, receive), send)

    async def _checked(self, headers: dict[bytes, bytes], receive: Any) -> bytes | None:
        """Read a body and check it; return ``None`` if its client has left."""
        declared = headers.get(b"content-length", b"")
        length = int(declared) if declared.isdigit() else 0
        _check_number(length, self._most, "bytes", _LARGER, is_whole=False)
        body = await self._reader.read(receive)
        if body is None:
            return None
        _check_number(len(body), self._most, "bytes", _LARGER, is_whole=False)
        # No part of a form is read as JSON.
        is_form = headers.get(b"content-type", b"").lower().startswith(b"multipart/")
        # Each object has a byte at least.
        if len(body) > min(self._most_text, bounds.MOST_OBJECTS):
            await asyncio.to_thread(self._check, body, is_form)
        return body

    def _check(self, body: bytes, is_form: bool) -> None:
        """Refuse a body for what it holds."""
        if len(body) > self._most_text:
            media = sum(match.end() - match.start() for match in _MEDIA.finditer(body))
            what = "bytes besides pictures and sound"
            _check_number(len(body) - media, self._most_text, what, _LARGER, is_whole=True)
        if is_form:
            return
        num_objects, num_keys = _num_parts(body)
        _check_number(num_objects, bounds.MOST_OBJECTS, "objects and lists", is_whole=True)
        _check_number(num_keys, bounds.MOST_KEYS, "keys", is_whole=True)


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
            MutableHeaders(scope=started[0])["content-length"] = str(len(body))
            await send(started[0])
            await send({**message, "body": body})

    return send_with_details


def _num_parts(body: bytes) -> tuple[int, int]:
    """Count the objects and lists of JSON, and its keys, in time that grows with its length.

    Returns:
        Their numbers, exact for UTF-8 where one is beyond its bound. Brackets and colons within
        text count too if there are no more of both, and in UTF-16 and UTF-32.
    """
    brackets, colons = body.count(b"{") + body.count(b"["), body.count(b":")
    is_within = brackets <= bounds.MOST_OBJECTS and colons <= bounds.MOST_KEYS
    # Only the other encodings have a zero byte in what can be read as JSON.
    if is_within or b"\0" in body:
        return brackets, colons
    # Backslashes stand within text alone. Without the escaped ones, and then without the escaped
    # quotes, each quote that is left begins or ends a text.
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.translate(None, _NO_STRUCTURE).split(b'"')[::2])
    num_keys = outside.count(b":")
    return len(outside) - num_keys, num_keys


def _check_number(number: int, most: int, what: str, or_else: str = "", *, is_whole: bool) -> None:
    """Refuse a body of which ``is_whole`` was read, for so many of its parts."""
    if number > most:
        raise BodyError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body has {number} {what}; the limit is {most}. Send less at once{or_else}.",
            is_whole=is_whole,
        )


async def _refuse_body(refusal: BodyError, scope: Any, receive: Any, send: Any) -> None:
    from starlette.responses import JSONResponse

    message, status = str(refusal), refusal.status
    error = {"message": message, "type": status.phrase, "param": "body", "code": status}
    logger.info("%s refused (%d, body): %s", scope["path"], status, message)
    _count_refusal("body", status)
    response = JSONResponse({"error": error}, status, refusal.headers)
    await response(scope, receive, discarding(receive, send) if refusal.discards else send)


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
    note_constraint(spellings.constraining_field(request) or CONSTRAINT)
    spellings.read_spellings(request, fields)
    if getattr(request, "use_beam_search", False) and model_config.is_diffusion:
        refuse(
            "use_beam_search",
            "is not supported for diffusion models, which do not write token after token; leave it out.",
        )
    # By the name here, where it is sent and its value.
    sent = {name: (name, value) for name, value in fields.items() if name.startswith(PREFIX)}
    for field in ("suffix", "prediction"):
        if (value := _text_field(request, field, fields, model_config)) is not None:
            _add(sent, PREFIX + field, field, value)
    if not sent:
        return
    if "vllm_xargs" not in type(request).model_fields:
        field, _ = next(iter(sent.values()))
        refuse(field, _NOT_TAKEN)
    for name, value in (request.vllm_xargs or {}).items():
        _add(sent, name, f"vllm_xargs.{name}", value)
    request.vllm_xargs = {name: value for name, (_, value) in sent.items()}


def _add(sent: dict[str, tuple[str, Any]], name: str, field: str, value: Any) -> None:
    """Note an argument that a body has, in one field with this value or in several."""
    other, known = sent.get(name, (field, value))
    if known is not None and known != value:
        refuse(other, f"cannot be combined with another {field}; leave one of them out.")
    sent[name] = other, value


def _text_field(request: Any, field: str, fields: Mapping[str, Any], model_config: Any) -> Any:
    """Return what a body has in a field that only some endpoints and models have, as its argument
    is sent to the engine; ``None`` if it has nothing there, or this model needs nothing of it.
    """
    value = getattr(request, field, None) or fields.get(field)
    if value is None or value == "":
        return None
    is_suffix = field == "suffix"
    if is_suffix and "suffix" not in type(request).model_fields:
        refuse(
            "suffix",
            "is a field of /v1/completions; a chat continues after its last message. Leave it out.",
        )
    # An answer token after token has its suffix in the prompt, or starts from nothing: there a
    # prediction is a hint that helps nobody, as in vLLM.
    if (spec := spec_of(model_config)) is None:
        return None
    reasons = [spec.refused_arguments(way).get(field) for way in spec.ways]
    if all(reasons):
        refuse(field, str(reasons[0]))
    if is_suffix:
        return value
    # Anthropic's protocol is turned into another body, which takes numbers and text only.
    if not isinstance(request, OpenAIBaseModel):
        refuse(field, _NOT_TAKEN)
    predicted_text(value, field)
    return value


class BoundedPrompts(BaseRenderer):
    """Base of a server's renderer: text is counted before it is made tokens.

    It is counted with all that a template has written into it, on every path. Where only some of
    its tokens are kept, as much of it is read as the longest prompt can have.
    """

    async def tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        text, tokenizer = prompt.get("prompt"), self.tokenizer
        if isinstance(text, str) and tokenizer is not None:
            most = self.model_config.max_model_len * tokenizer.max_chars_per_token
            if params.truncate_prompt_tokens is None:
                check_characters(text, most)
            elif len(text) > most:
                side = params.truncation_side or getattr(tokenizer, "truncation_side", "left")
                prompt = {**prompt, "prompt": text[-most:] if side == "left" else text[:most]}
        return await super().tokenize_prompt_async(prompt, params)

    async def _process_tokens_async(self, prompt: Any, **kwargs: Any) -> Any:
        prepared = await super()._process_tokens_async(prompt, **kwargs)
        note_prepared(self, prepared)
        return prepared


class SuffixesInCanvases(BoundedPrompts):
    """Base of the renderer of a server with canvases: a suffix stands in the canvas after the
    answer, and not in the prompt.
    """

    def render_completion_suffix(self, prompt: str, suffix: str) -> str | None:
        return prompt


def check_characters(text: str, most: int) -> None:
    """Refuse text of which no prompt could be made, before it is made tokens.

    Args:
        text: A prompt, or what a template made of messages, tools and their like.
        most: Characters of the longest prompt, at as many a token as the tokenizer has.

    Raises:
        VLLMValidationError: Naming the prompt, of which messages and tools are parts.
    """
    if len(text) > most:
        refuse(
            "prompt",
            f"has {len(text)} characters with all messages and tools; at most {most} fit into this model's context. Send "
            "less.",
        )


def num_answers(request: Any) -> int:
    """Return the number of answers that a body asks for."""
    return _num_prompts(request) * (getattr(request, "n", None) or 1)


def _num_prompts(request: Any) -> int:
    """Return the number of prompts of a completion or a batch of chats."""
    prompt, chats = getattr(request, "prompt", None), getattr(request, "messages", None)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return len(chats) if isinstance(chats, list) and chats and isinstance(chats[0], list) else 1


def _check_lengths(request: Any, model_config: Any) -> None:
    """Refuse lists by their lengths, before anything reads their items."""
    prompt, num_prompts = getattr(request, "prompt", None), _num_prompts(request)
    if isinstance(prompt, list) and getattr(request, "truncate_prompt_tokens", None) is None:
        prompts = [prompt] if num_prompts == 1 else prompt
        longest = max((len(ids) for ids in prompts if isinstance(ids, list)), default=0)
        if longest > (most := model_config.max_model_len):
            refuse("prompt", f"has {longest} tokens; this model takes at most {most}. Send fewer.")
    answers = num_answers(request)
    if num_prompts > 1 and answers > bounds.MOST_ANSWERS:
        refuse(
            "n",
            f"times the number of prompts, {num_prompts}, is {answers}; the limit of a request is "
            f"{bounds.MOST_ANSWERS}. Split the request.",
        )
