"""Endpoints of vLLM's OpenAI server with the classes that diffusion models need.

vLLM's server keeps one object for each endpoint. Before the server answers its first request, each
of them is given a subclass of ours, which checks more and sends more. A frame is a chunk of the
stream whose delta is empty, which clients skip, with what is shown next to it. Emitted text stays
in ordinary deltas. :class:`CheckedModels` refuses an adapter that would end the engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.decisions.question_types import LABELS
from vllm.entrypoints.openai.decisions.serving import OpenAIServingDecisions
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.live.delivery import STEP_MAP, TRACE, WHERE_FRAMES_ARE
from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap, ParsedAnswers, StreamedFrame
from vllm_diffusion.live.streamed_parser import following_whole_answers
from vllm_diffusion.live.watch import Inbox, items_of
from vllm_diffusion.metrics import ANSWER
from vllm_diffusion.requests.arguments import argument_names, parse_shown
from vllm_diffusion.requests.constraint import read_constraint_aside
from vllm_diffusion.requests.http import (
    DETAILS,
    BoundedPrompts,
    CheckedClient,
    SuffixesInCanvases,
    check_fields,
    know_fields,
    read_body,
)
from vllm_diffusion.requests.refusals import ending_with_refusal, refuse
from vllm_diffusion.requests.tool_calls.read_tools import read_tools_aside
from vllm_diffusion.startup.plan import spec_of
from vllm_diffusion.weights.adapters.early_checks import rules_of

_WHERE_TRACES_ARE = (
    "comes with whole answers of /v1/chat/completions and /v1/completions: leave stream out, or "
    "leave it out."
)

# Texts of a request of which the usage tells how many tokens were taken.
_COUNTED = ("diffusion_prediction", "diffusion_suffix")
# Makes vLLM's events of outputs.
_Stream = Callable[[AsyncIterator[Any]], AsyncGenerator[str, None]]


class _ParametersFirst(OpenAIServingChat):
    """Chats whose sampling parameters are checked before their pictures are processed.

    vLLM keeps a picture that it has processed as one that the engine has, also where the request is
    refused before it is sent, and the next request with the picture would be an error.
    """

    async def render_chat_request(self, request: Any) -> Any:
        # Beams have parameters of their own.
        if not request.use_beam_search:
            self._check_parameters(request)
        await read_tools_aside(request.tools)
        if _has_media(request.messages):
            await self._read_constraint(request)
        return await super().render_chat_request(request)

    async def _read_constraint(self, chat: Any) -> None:
        """Read the constraint of a chat, and that of its tools.

        Read after the pictures, one that is refused would leave them with no engine, and while one
        is read other requests with the same picture would be sent without it.
        """
        tokenizer = self.renderer.tokenizer
        if chat.tools and self.parser_cls is not None and tokenizer is not None:
            # The parser writes into its request.
            copy = chat.model_copy()
            chat = self._make_parser(copy, tokenizer, None).adjust_request(copy)
        params = chat.to_sampling_params(1, self.default_sampling_params)
        config = self.engine_client.vllm_config.structured_outputs_config
        await read_constraint_aside(params.structured_outputs, config)

    def _check_parameters(self, chat: Any) -> None:
        most = chat.max_completion_tokens or chat.max_tokens
        chat.to_sampling_params(most, self.default_sampling_params)


def _has_media(messages: Any) -> bool:
    """Return true if some message has a part that is not text."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


class ChatWithFrames(_ParametersFirst):
    """``/v1/chat/completions``: frames in its streams, step maps and traces in its whole
    answers.
    """

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        _read_diffusing(request, self.model_config)
        return await super().create_chat_completion(request, raw_request)

    def chat_completion_stream_generator(
        self,
        request: Any,
        result_generator: Any,
        request_id: str,
        model_name: str,
        conversation: Any,
        tokenizer: Any,
        request_metadata: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_token_counts: dict[str, int] | None = None,
    ) -> AsyncGenerator[str, None]:
        stock = super().chat_completion_stream_generator

        def stream(outputs: Any) -> AsyncGenerator[str, None]:
            about = (conversation, tokenizer, request_metadata, chat_template_kwargs)
            return stock(request, outputs, request_id, model_name, *about, mm_token_counts)

        events = _with_counted_usage(request, stream)
        shown = parse_shown(request.vllm_xargs)
        if not shown:
            return events(result_generator)
        head = {"id": request_id, "object": "chat.completion.chunk", "model": model_name}
        inbox, parsed = Inbox([request_id]), None
        if shown.frame_interval and self.parser_cls is not None and tokenizer is not None:
            parsed = ParsedAnswers(self, request, tokenizer, chat_template_kwargs)
        chunks = _Chunks(head, {"delta": {}}, request.n or 1, inbox, parsed)
        return _with_events(events, result_generator, chunks)

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        last: list[Any] = []
        outputs = _noting(result_generator, last)
        response = await super().chat_completion_full_generator(request, outputs, *args, **kwargs)
        if last:
            _add_step_maps(response, last[0].outputs)
            usage = getattr(response, "usage", None)
            if usage is not None and (counts := _counts(request, last)):
                usage.completion_tokens_details = _detailed(usage.completion_tokens_details, counts)
        return response


class CompletionsWithFrames(OpenAIServingCompletion):
    """``/v1/completions``: frames in its streams, step maps and traces in its whole answers."""

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        _read_diffusing(request, self.model_config)
        return await super().create_completion(request, raw_request)

    def completion_stream_generator(
        self,
        request: Any,
        engine_inputs: Any,
        result_generator: Any,
        request_id: str,
        created_time: int,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        stock = super().completion_stream_generator
        request_ids = [f"{request_id}-{i}" for i in range(len(engine_inputs))]

        async def numbered(outputs: AsyncIterator[Any]) -> AsyncGenerator[tuple[int, Any], None]:
            async for output in outputs:
                yield request_ids.index(output.request_id), output

        async def unnumbered() -> AsyncGenerator[Any, None]:
            async for _, output in result_generator:
                yield output

        def stream(outputs: Any) -> AsyncGenerator[str, None]:
            after = (request_id, created_time, model_name)
            return stock(request, engine_inputs, numbered(outputs), *after, *args, **kwargs)

        events = _with_counted_usage(request, stream)
        if not parse_shown(request.vllm_xargs):
            return events(unnumbered())
        head = {"id": request_id, "object": "text_completion", "model": model_name}
        chunks = _Chunks(head, {"text": ""}, request.n or 1, Inbox(request_ids))
        return _with_events(events, result_generator, chunks)

    def request_output_to_completion_response(
        self, final_res_batch: list[Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        stock = super().request_output_to_completion_response
        response = stock(final_res_batch, request, *args, **kwargs)
        _add_step_maps(response, [output for res in final_res_batch for output in res.outputs])
        if counts := _counts(request, final_res_batch):
            usage = response.usage
            usage.completion_tokens_details = _detailed(usage.completion_tokens_details, counts)
        return response


class ChatBatchWithoutFrames(_ParametersFirst, OpenAIServingChatBatch):
    """``/v1/chat/completions/batch``, which cannot send frames."""

    async def create_batch_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        _refuse_frames(request, self.model_config)
        for messages in request.messages:
            self._check_parameters(request.to_chat_completion_request(messages))
        return await super().create_batch_chat_completion(request, raw_request)


class MessagesWithoutFrames(_ParametersFirst, AnthropicServingMessages):
    """``/v1/messages``, which cannot send frames; ``thinking`` turns thinking on."""

    async def create_messages(self, request: Any, raw_request: Any = None) -> Any:
        # vLLM's protocol drops fields that it does not know.
        body = {} if raw_request is None else await raw_request.json()
        _refuse_frames(request, self.model_config, body)
        if body.get("thread"):
            # With these details the SDKs send the whole conversation.
            raw_request.scope[DETAILS] = {"error_code": "thread_unsupported_request"}
            refuse("thread", "is not supported: send the whole conversation in messages.")
        return await super().create_messages(request, raw_request)

    @classmethod
    def _handle_thinking(cls, req: Any, anthropic_request: Any, *args: Any, **kwargs: Any) -> None:
        """Have the chat template let the model think, where vLLM sets no more than the budget."""
        super()._handle_thinking(req, anthropic_request, *args, **kwargs)
        thinking = anthropic_request.thinking
        if thinking is not None and thinking.type != "disabled":
            req.chat_template_kwargs = {"enable_thinking": True, **(req.chat_template_kwargs or {})}


class ResponsesWithoutFrames(OpenAIServingResponses):
    """``/v1/responses``, which cannot send frames; a stream that is refused ends with an event."""

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        _refuse_frames(request, self.model_config)
        # As for chats, before pictures are processed.
        most = self.model_config.max_model_len
        params = request.to_sampling_params(most, self.default_sampling_params)
        config = self.engine_client.vllm_config.structured_outputs_config
        await read_constraint_aside(params.structured_outputs, config)
        await read_tools_aside(request.tools)
        response = await super().create_responses(request, raw_request)
        # Where a stream has begun, a refusal comes too late for its status.
        return ending_with_refusal(response) if isinstance(response, AsyncGenerator) else response

    async def responses_full_generator(
        self, request: Any, sampling_params: Any, results: Any, context: Any, *args: Any, **kw: Any
    ) -> Any:
        # Of streams it makes the last event.
        stock = super().responses_full_generator
        response = await stock(request, sampling_params, results, context, *args, **kw)
        usage, last = getattr(response, "usage", None), getattr(context, "last_output", None)
        if usage is not None and last is not None and (counts := _counts(request, [last])):
            _detailed(usage.output_tokens_details, counts)
        return response


class NamingDecisions(OpenAIServingDecisions):
    """``/v1/decisions``, which names a question that has more options than can be read."""

    async def create_decisions(self, request: Any, raw_request: Any = None) -> Any:
        most = min(self.limits.max_options, len(LABELS))
        for i, question in enumerate(request.questions):
            num = len(getattr(question, "choices", ()) or getattr(question, "levels", ()))
            if num > most:
                name = "" if question.name is None else f" ({question.name})"
                refuse(
                    "questions",
                    f"may have up to {most} options each; question {i}{name} has {num}. Ask several.",
                )
        return await super().create_decisions(request, raw_request)


class RenderingFrames(ServingRender):
    """Endpoints that make engine inputs of chats and completions; they read ``diffusing`` as
    well.
    """

    async def render_chat_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        _read_diffusing(request, self.model_config)
        await read_tools_aside(request.tools)
        return await super().render_chat_request(request, *args, **kwargs)

    async def render_completion_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        _read_diffusing(request, self.model_config)
        return await super().render_completion_request(request, *args, **kwargs)


class CheckedTokenization(ServingTokenization):
    """``/tokenize``, which reads the calls of earlier turns as a chat does."""

    async def create_tokenize(self, request: Any, raw_request: Any) -> Any:
        check_fields(request)
        return await super().create_tokenize(request, raw_request)


class CheckedModels(OpenAIServingModels):
    """Models and adapters of a server, which refuses an adapter that would end its engine."""

    async def _check_load_lora_adapter_request(self, request: Any) -> Any:
        refusal = await super()._check_load_lora_adapter_request(request)
        rules = rules_of(self.model_config)
        if refusal is not None or rules is None:
            return refusal
        at_start = {lora.name for lora in self.static_lora_modules or ()}
        num_servers = self.engine_client.vllm_config.parallel_config._api_process_count
        try:
            if num_servers > 1 and request.lora_name not in at_start:
                raise ValueError(
                    "cannot be loaded by one of several API servers, since the others would not know it; "
                    "name it in --lora-modules, or start with --api-server-count 1."
                )
            # A repository may have to be fetched.
            await asyncio.to_thread(rules.check_loading, request.lora_name, request.lora_path)
        except ValueError as error:
            return create_error_response(
                message=f"lora_path {error}",
                err_type="BadRequestError",
                status_code=HTTPStatus.BAD_REQUEST,
                param="lora_path",
            )
        return None


# By name in the state of vLLM's server.
ENDPOINTS: dict[str, type] = {
    "serving_render": RenderingFrames,
    "serving_tokenization": CheckedTokenization,
    "openai_serving_chat": ChatWithFrames,
    "openai_serving_completion": CompletionsWithFrames,
    "openai_serving_chat_batch": ChatBatchWithoutFrames,
    "anthropic_serving_messages": MessagesWithoutFrames,
    "openai_serving_responses": ResponsesWithoutFrames,
    "openai_serving_models": CheckedModels,
    "openai_serving_decisions": NamingDecisions,
}


def _read_diffusing(request: Any, model_config: Any) -> None:
    """Read a body, and ask for the frames of a request whose field ``diffusing`` is true.

    Args:
        request: A chat's or a completion's, whose ``vllm_xargs`` are set in place.
        model_config: vLLM's ``ModelConfig``.

    Raises:
        VLLMValidationError: If the field is neither true nor false, or a stream asks for a trace.
    """
    read_body(request, model_config)
    diffusing = (request.model_extra or {}).get("diffusing")
    if diffusing not in (None, True, False):
        raise VLLMValidationError(
            f"diffusing={diffusing!r} must be true or false.",
            parameter="diffusing",
            value=diffusing,
        )
    if diffusing:
        request.vllm_xargs = {"diffusion_frames": 1, **(request.vllm_xargs or {})}
    if request.stream and (request.vllm_xargs or {}).get(TRACE):
        refuse(TRACE, _WHERE_TRACES_ARE, request.vllm_xargs[TRACE])


def _refuse_frames(request: Any, model_config: Any, body: dict[str, Any] | None = None) -> None:
    """Read a body, and refuse one that asks for frames or traces where none can be sent.

    Args:
        request: The body as vLLM's protocol read it.
        model_config: vLLM's ``ModelConfig``.
        body: All its fields; ``None`` where the protocol keeps those that it does not know.

    Raises:
        VLLMValidationError: Naming the field.
    """
    read_body(request, model_config, body)
    unknown = request.model_extra or {} if body is None else body
    # A batch has no such field of its own.
    xargs = getattr(request, "vllm_xargs", unknown.get("vllm_xargs"))
    requested = {"diffusing": unknown.get("diffusing")}
    if isinstance(xargs, dict):
        requested["diffusion_frames"] = xargs.get("diffusion_frames")
    for field, value in requested.items():
        if value:
            refuse(field, WHERE_FRAMES_ARE, value)
    if isinstance(xargs, dict) and xargs.get(TRACE):
        refuse(TRACE, _WHERE_TRACES_ARE, xargs[TRACE])


async def _noting(outputs: AsyncIterator[Any], last: list[Any]) -> AsyncGenerator[Any, None]:
    async for output in outputs:
        last[:] = [output]
        yield output


def _add_step_maps(response: Any, completions: list[Any]) -> None:
    """Add to each choice which steps decided its tokens, and from what, where that was
    requested.
    """
    for choice, completion in zip(getattr(response, "choices", ()), completions, strict=False):
        if hasattr(completion, STEP_MAP):
            setattr(choice, STEP_MAP, list(getattr(completion, STEP_MAP)))
        if hasattr(completion, TRACE):
            setattr(choice, TRACE, getattr(completion, TRACE))


def _counts(request: Any, outputs: Iterable[Any]) -> dict[str, int]:
    """Count tokens of a request's prediction and suffix, for which vLLM's usage has no fields.

    Args:
        request: A body that was read.
        outputs: The last output of each of its prompts, with all answers.

    Returns:
        Fields of the usage's details, those of the texts that the request has.
    """
    sent = request.vllm_xargs or {}
    answers = [[getattr(one, ANSWER) for one in output.outputs] for output in outputs]
    counts = {}
    if "diffusion_prediction" in sent:
        followed = [one.followed for of_prompt in answers for one in of_prompt]
        counts["accepted_prediction_tokens"] = sum(text.accepted for text in followed if text)
        counts["rejected_prediction_tokens"] = sum(text.rejected for text in followed if text)
    if "diffusion_suffix" in sent:
        # As tokens of a prompt are: once for all of its answers.
        counts["suffix_tokens"] = sum(of_prompt[0].num_suffix for of_prompt in answers)
    return counts


def _detailed(details: Any, counts: dict[str, int]) -> Any:
    """Add counts to a usage's details, which may be missing, and return them."""
    details = details or CompletionTokenUsageInfo()
    for name, count in counts.items():
        setattr(details, name, count)
    return details


def _with_counted_usage(request: Any, stream: _Stream) -> _Stream:
    """Add the tokens of a prediction and a suffix to the last event of a stream of vLLM's, if the
    request has one of them and that event has the usage.
    """
    if not any(name in (request.vllm_xargs or {}) for name in _COUNTED):
        return stream

    async def events(outputs: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
        # By prompt and answer: an output may hold one of several answers.
        last: dict[str, dict[int, Any]] = {}

        async def noted() -> AsyncGenerator[Any, None]:
            async for output in outputs:
                answers = last.setdefault(output.request_id, {})
                answers.update((one.index, one) for one in output.outputs)
                yield output

        async for event in stream(noted()):
            if '"choices":[]' in event:
                chunk = json.loads(event.removeprefix("data: "))
                of_prompts = [SimpleNamespace(outputs=[*each.values()]) for each in last.values()]
                # As whole answers have them.
                details = CompletionTokenUsageInfo().model_dump()
                details |= chunk["usage"].get("completion_tokens_details") or {}
                chunk["usage"]["completion_tokens_details"] = details
                details.update(_counts(request, of_prompts))
                text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
                event = f"data: {text}\n\n"
            yield event

    return events


async def _with_events(
    stream: _Stream,
    result_generator: AsyncGenerator[Any, None],
    chunks: _Chunks,
) -> AsyncGenerator[str, None]:
    """Yield the server-sent events that vLLM makes of outputs, with those of frames in their
    places.

    vLLM asks for an output when it has sent all that it made of the one before. What lies between
    two outputs is therefore sent while vLLM waits for the second.

    Args:
        stream: Makes vLLM's events of outputs.
        result_generator: The engine's outputs.
        chunks: Makes events of frames and step maps.
    """
    watched = items_of(result_generator, chunks.inbox)
    # Of one event: a client that reads slowly makes vLLM wait.
    ready: asyncio.Queue[str | Exception | None] = asyncio.Queue(maxsize=1)

    async def outputs() -> AsyncGenerator[Any, None]:
        async for item in watched:
            if isinstance(item, (CanvasFrame, CanvasStepMap)):
                await ready.put(chunks.of(item))
            else:
                chunks.take(item)
                yield item

    async def send() -> None:
        try:
            async for event in stream(outputs()):
                await ready.put(event)
        except Exception as error:
            await ready.put(error)
        else:
            await ready.put(None)

    sending = asyncio.ensure_future(send())
    try:
        while (event := await ready.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event
    finally:
        # Whoever stops reading stops the requests.
        sending.cancel()
        await asyncio.wait({sending})
        await watched.aclose()


class _Chunks:
    """Makes chunks of the stream of frames and step maps."""

    def __init__(
        self,
        head: dict[str, Any],
        nothing: dict[str, Any],
        num_answers: int,
        inbox: Inbox,
        parsed: ParsedAnswers | None = None,
    ) -> None:
        """Fix what all chunks of a stream have in common.

        Args:
            head: Fields of a chunk in addition to its choices.
            nothing: The fields of an empty choice.
            num_answers: Answers to each prompt.
            inbox: The call's.
            parsed: The answers as parsers read them; ``None`` if there is no parser.
        """
        self._head = head | {"created": int(time.time())}
        self._nothing = nothing
        self._num_answers = num_answers
        self.inbox = inbox
        self._parsed = parsed

    def take(self, output: Any) -> None:
        """Hear of an output before vLLM makes chunks of it."""
        if self._parsed is not None:
            self._parsed.take(output)

    def of(self, event: CanvasFrame | CanvasStepMap) -> str:
        """Return the server-sent event of a frame or step map."""
        index = event.prompt_index * self._num_answers + event.index
        choice = {"index": index, **self._nothing, "logprobs": None, "finish_reason": None}
        fields = event.event_fields()
        if self._parsed is not None and isinstance(event, StreamedFrame):
            fields |= self._parsed.shown(event, self.inbox.prompts[event.prompt_index])
        shown = {name: value for name, value in fields.items() if value is not None}
        return f"data: {json.dumps({**self._head, 'choices': [choice], **shown})}\n\n"


def install() -> None:
    """Serve the endpoints of this process with classes of ours. Safe to call twice."""
    _serving_canvases.install()


@replaces_call(
    "vllm.entrypoints.launchers.api_server.app_state:init_endpoint_plugins_state",
    reason="Gives the objects that serve vLLM's endpoints subclasses of ours, once the server has them.",
    until="A plugin may name the classes of the server's objects, or of an endpoint plugin without VLLM_PLUGINS.",
)
async def _serving_canvases(stock: Any, engine_client: Any, state: Any, args: Any) -> None:
    if type(engine_client) is AsyncLLM:
        engine_client.__class__ = CheckedClient
    spec = spec_of(engine_client.model_config)
    renderer, of_vllm = engine_client.renderer, type(engine_client.renderer)
    base = BoundedPrompts if spec is None else SuffixesInCanvases
    if spec is not None:
        know_fields(argument_names(spec))
    renderer.__class__ = type(of_vllm.__name__, (base, of_vllm), {})
    for name, cls in ENDPOINTS.items():
        served = getattr(state, name, None)
        # What the server does not offer is None. Other objects of the server hold this one, so it
        # stays the same object.
        if served is not None:
            served.__class__ = cls
            _stream_whole_answers(served)
    await stock(engine_client, state, args)


def _stream_whole_answers(served: Any) -> None:
    """Give an object of the server parsers whose streams equal whole answers, if its model answers
    in canvases.
    """
    if spec_of(served.model_config) is None:
        return
    # Under one name for chats, under the other for responses.
    for name in ("parser_cls", "parser"):
        if parser_cls := getattr(served, name, None):
            setattr(served, name, following_whole_answers(parser_cls))
