"""Frames, step maps and counts of texts in the answers of vLLM's OpenAI server.

A frame is a chunk of the stream with an empty delta, which clients skip, and the frame's fields
next to it. Emitted text stays in ordinary deltas. The classes are those of
``requests/endpoints.py``, with more in what they send.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.live.delivery import STEP_MAP
from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap, ParsedAnswers, StreamedFrame
from vllm_diffusion.live.streamed_parser import following_whole_answers
from vllm_diffusion.live.watch import Inbox, items_of
from vllm_diffusion.metrics import ANSWER
from vllm_diffusion.requests.arguments import TRACE, argument_names, parse_shown
from vllm_diffusion.requests.client import CheckedClient
from vllm_diffusion.requests.endpoints import (
    CheckedChat,
    CheckedChatBatch,
    CheckedCompletions,
    CheckedDecisions,
    CheckedMessages,
    CheckedModels,
    CheckedRender,
    CheckedResponses,
    CheckedTokenization,
)
from vllm_diffusion.requests.http import (
    BoundedPrompts,
    SuffixesInCanvases,
    know_fields,
)
from vllm_diffusion.startup.plan import spec_of

# Makes vLLM's events of outputs.
_Stream = Callable[[AsyncIterator[Any]], AsyncGenerator[str, None]]


class ChatWithFrames(CheckedChat):
    """``/v1/chat/completions``: frames in its streams, step maps and traces in its whole
    answers.
    """

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
            _add_counts(request, [last[0].outputs], getattr(response, "usage", None))
        return response


class CompletionsWithFrames(CheckedCompletions):
    """``/v1/completions``: frames in its streams, step maps and traces in its whole answers."""

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
        _add_counts(request, [res.outputs for res in final_res_batch], response.usage)
        return response


class ResponsesWithCounts(CheckedResponses):
    """``/v1/responses``, whose usage counts the tokens of a prediction."""

    async def responses_full_generator(
        self, request: Any, sampling_params: Any, results: Any, context: Any, *args: Any, **kw: Any
    ) -> Any:
        # In a stream it is the last event.
        stock = super().responses_full_generator
        response = await stock(request, sampling_params, results, context, *args, **kw)
        usage, last = getattr(response, "usage", None), getattr(context, "last_output", None)
        if last is not None:
            _add_counts(request, [last.outputs], usage, "output_tokens_details")
        return response


# By name in the state of vLLM's server.
ENDPOINTS: dict[str, type] = {
    "serving_render": CheckedRender,
    "serving_tokenization": CheckedTokenization,
    "openai_serving_chat": ChatWithFrames,
    "openai_serving_completion": CompletionsWithFrames,
    "openai_serving_chat_batch": CheckedChatBatch,
    "anthropic_serving_messages": CheckedMessages,
    "openai_serving_responses": ResponsesWithCounts,
    "openai_serving_models": CheckedModels,
    "openai_serving_decisions": CheckedDecisions,
}


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


def _counts(request: Any, answers: Iterable[Any]) -> dict[str, int]:
    """Count tokens of a request's prediction and suffix, for which vLLM's usage has no fields.

    Args:
        request: A body that was read.
        answers: The last output of each answer, by prompt.

    Returns:
        Fields of the usage's details, those of the texts that the request has.
    """
    sent = request.vllm_xargs or {}
    reported = [[getattr(one, ANSWER) for one in of_prompt] for of_prompt in answers]
    counts = {}
    if "diffusion_prediction" in sent:
        followed = [one.followed for of_prompt in reported for one in of_prompt]
        counts["accepted_prediction_tokens"] = sum(text.accepted for text in followed if text)
        counts["rejected_prediction_tokens"] = sum(text.rejected for text in followed if text)
    if "diffusion_suffix" in sent:
        # As tokens of a prompt are: once for all of its answers.
        counts["suffix_tokens"] = sum(of_prompt[0].num_suffix for of_prompt in reported)
    return counts


def _add_counts(
    request: Any, answers: Iterable[Any], usage: Any, at: str = "completion_tokens_details"
) -> None:
    """Add :func:`_counts` to the details of a usage, its field ``at``; both may be missing."""
    if usage is not None and (counts := _counts(request, answers)):
        details = getattr(usage, at) or CompletionTokenUsageInfo()
        for name, count in counts.items():
            setattr(details, name, count)
        setattr(usage, at, details)


def _with_counted_usage(request: Any, stream: _Stream) -> _Stream:
    """Add the tokens of a prediction and a suffix to the last event of a stream of vLLM's, if the
    request has one of them and that event has the usage.
    """
    if not _counts(request, ()):
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
                # As whole answers have them.
                details = CompletionTokenUsageInfo().model_dump()
                details |= chunk["usage"].get("completion_tokens_details") or {}
                chunk["usage"]["completion_tokens_details"] = details
                details |= _counts(request, [[*each.values()] for each in last.values()])
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
    # It holds one event: a client that reads slowly makes vLLM wait.
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


@dataclass(frozen=True)
class _Chunks:
    """Maker of the chunks of a stream's frames and step maps.

    Attributes:
        head: Fields of a chunk in addition to its choices and its time.
        nothing: The fields of an empty choice.
        num_answers: Answers to each prompt.
        inbox: The call's.
        parsed: The answers as parsers read them; ``None`` if there is no parser.
        created: Time of all its chunks, in seconds.
    """

    head: dict[str, Any]
    nothing: dict[str, Any]
    num_answers: int
    inbox: Inbox
    parsed: ParsedAnswers | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def take(self, output: Any) -> None:
        """Hear of an output before vLLM makes chunks of it."""
        if self.parsed is not None:
            self.parsed.take(output)

    def of(self, event: CanvasFrame | CanvasStepMap) -> str:
        """Return the server-sent event of a frame or step map."""
        index = event.prompt_index * self.num_answers + event.index
        choice = {"index": index, **self.nothing, "logprobs": None, "finish_reason": None}
        fields = event.event_fields()
        if self.parsed is not None and isinstance(event, StreamedFrame):
            fields |= self.parsed.shown(event, self.inbox.prompts[event.prompt_index])
        shown = {name: value for name, value in fields.items() if value is not None}
        chunk = {**self.head, "created": self.created, "choices": [choice], **shown}
        return f"data: {json.dumps(chunk)}\n\n"


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
    """Give a serving object parsers that stream exactly what they make of whole answers, if its
    model answers in canvases.
    """
    if spec_of(served.model_config) is None:
        return
    # Under one name for chats, under the other for responses.
    for name in ("parser_cls", "parser"):
        if parser_cls := getattr(served, name, None):
            setattr(served, name, following_whole_answers(parser_cls))
