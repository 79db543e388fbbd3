"""Frames and step maps in the responses of vLLM's OpenAI server.

A frame is a chunk of the stream whose delta is empty, which clients skip, with what is shown beside
it. Committed text stays in ordinary deltas.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from vllm_diffusion.hooks.replacement import replaces
from vllm_diffusion.live.delivery import STEP_MAP, TRACE, WHERE_FRAMES_ARE
from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap
from vllm_diffusion.live.inbox import Inbox
from vllm_diffusion.live.parsed import ParsedAnswers
from vllm_diffusion.live.watch import items_of
from vllm_diffusion.requests.arguments import parse_shown
from vllm_diffusion.requests.refused_streams import ending_with_refusals

_WHERE_TRACES_ARE = (
    "comes with whole answers of /v1/chat/completions and /v1/completions: leave stream out, or "
    "leave it out."
)


def install() -> None:
    """Send frames on the two endpoints that stream completions. Safe to call twice."""
    _reading_diffusing.install()
    _chat_with_frames.install()
    _completion_with_frames.install()
    _chat_with_step_maps.install()
    _completion_with_step_maps.install()
    _refusing_responses.install()
    _refusing_others.install()


@replaces(
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses",
    reason="Refuses frames, which it cannot send, and ends a stream that is refused with an event.",
    until="Requests are checked before a stream's first event, and a plugin may check an endpoint's requests.",
)
def _refusing_responses(stock: Any) -> Any:
    # Where a stream has begun, a refusal comes too late for its status.
    return ending_with_refusals(_without_frames(stock))


@replaces(
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages",
    "vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion",
    reason="Refuses frames, which these endpoints cannot send.",
    until="A plugin may check an endpoint's requests.",
)
def _refusing_others(stock: Any) -> Any:
    return _without_frames(stock)


def _without_frames(stock: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    async def create(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        unknown = request.model_extra or {}
        # A batch has no such field of its own.
        xargs = getattr(request, "vllm_xargs", unknown.get("vllm_xargs"))
        asked = {"diffusing": unknown.get("diffusing")}
        if isinstance(xargs, dict):
            asked["diffusion_frames"] = xargs.get("diffusion_frames")
        for field, value in asked.items():
            if value:
                raise VLLMValidationError(
                    f"{field} {WHERE_FRAMES_ARE}", parameter=field, value=value
                )
        if isinstance(xargs, dict) and xargs.get(TRACE):
            raise VLLMValidationError(
                f"{TRACE} {_WHERE_TRACES_ARE}", parameter=TRACE, value=xargs[TRACE]
            )
        return await stock(self, request, *args, **kwargs)

    return create


@replaces(
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_sampling_params",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_sampling_params",
    reason="Reads the field diffusing, which asks for frames.",
    until="A plugin may add fields to the protocol.",
)
def _reading_diffusing(stock: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        diffusing = (self.model_extra or {}).get("diffusing")
        if diffusing not in (None, True, False):
            raise VLLMValidationError(
                f"diffusing={diffusing!r} must be true or false.",
                parameter="diffusing",
                value=diffusing,
            )
        if diffusing:
            self.vllm_xargs = {"diffusion_frames": 1, **(self.vllm_xargs or {})}
        if self.stream and (self.vllm_xargs or {}).get(TRACE):
            raise VLLMValidationError(
                f"{TRACE} {_WHERE_TRACES_ARE}", parameter=TRACE, value=self.vllm_xargs[TRACE]
            )
        return stock(self, *args, **kwargs)

    return to_sampling_params


@replaces(
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator",
    reason="Sends frames between the chunks of a chat's stream.",
    until="A plugin may send events of its own in a stream.",
)
def _chat_with_frames(stock: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    def chat_completion_stream_generator(
        self: Any,
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
        def stream(outputs: Any) -> AsyncGenerator[str, None]:
            about = (conversation, tokenizer, request_metadata, chat_template_kwargs)
            return stock(self, request, outputs, request_id, model_name, *about, mm_token_counts)

        shown = parse_shown(request.vllm_xargs)
        # Others are made of its stream, in formats that have no frames.
        if type(self) is not OpenAIServingChat or not shown:
            return stream(result_generator)
        head = {"id": request_id, "object": "chat.completion.chunk", "model": model_name}
        inbox, parsed = Inbox([request_id]), None
        if shown.frame_interval and self.parser_cls is not None and tokenizer is not None:
            parsed = ParsedAnswers(self, request, tokenizer, chat_template_kwargs)
        chunks = _Chunks(head, {"delta": {}}, request.n or 1, inbox, parsed)
        return _with_events(stream, result_generator, chunks)

    return chat_completion_stream_generator


@replaces(
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.completion_stream_generator",
    reason="Sends frames between the chunks of a completion's stream.",
    until="A plugin may send events of its own in a stream.",
)
def _completion_with_frames(stock: Any) -> Any:
    def completion_stream_generator(
        self: Any,
        request: Any,
        engine_inputs: Any,
        result_generator: Any,
        request_id: str,
        created_time: int,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        request_ids = [f"{request_id}-{i}" for i in range(len(engine_inputs))]

        async def numbered(outputs: AsyncIterator[Any]) -> AsyncGenerator[tuple[int, Any], None]:
            async for output in outputs:
                yield request_ids.index(output.request_id), output

        def stream(outputs: Any) -> AsyncGenerator[str, None]:
            before, after = (self, request, engine_inputs), (request_id, created_time, model_name)
            return stock(*before, outputs, *after, *args, **kwargs)

        if not parse_shown(request.vllm_xargs):
            return stream(result_generator)
        head = {"id": request_id, "object": "text_completion", "model": model_name}
        chunks = _Chunks(head, {"text": ""}, request.n or 1, Inbox(request_ids))
        return _with_events(lambda outputs: stream(numbered(outputs)), result_generator, chunks)

    return completion_stream_generator


async def _with_events(
    stream: Callable[[AsyncIterator[Any]], AsyncGenerator[str, None]],
    result_generator: AsyncGenerator[Any, None],
    chunks: _Chunks,
) -> AsyncGenerator[str, None]:
    """Yield the server-sent events that vLLM makes of outputs, with those of frames in their places.

    vLLM asks for an output when it has sent all that it made of the one before. What lies between two
    outputs is therefore sent while vLLM waits for the second.

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
            head: Fields of a chunk beside its choices.
            nothing: The fields of a choice that says nothing.
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
        fields = _shown(event)
        if self._parsed is not None and isinstance(event, CanvasFrame):
            fields |= self._parsed.shown(event, self.inbox.prompts[event.prompt_index])
        shown = {name: value for name, value in fields.items() if value is not None}
        return f"data: {json.dumps({**self._head, 'choices': [choice], **shown})}\n\n"


def _shown(event: CanvasFrame | CanvasStepMap) -> dict[str, Any]:
    """Return what a chunk holds beside its empty choice."""
    if isinstance(event, CanvasStepMap):
        return {"type": "diffusion_step_map", "block": event.block, "steps": event.steps}
    return {
        "type": "diffusion_frame",
        "block": event.block,
        "step": event.step,
        "total": event.total,
        "offset": event.offset,
        "text": event.text,
        "num_tokens": len(event.answer_token_ids),
        "is_last": event.is_last,
        "begins_anew": event.begins_anew,
        "token_ids": event.token_ids,
        "tokens": event.tokens,
        "kept": event.kept,
        "entropy": None if event.entropy is None else [round(e, 4) for e in event.entropy],
    }


@replaces(
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator",
    reason="Adds step maps and traces to the choices of a whole chat answer.",
    until="A plugin may add fields to a choice.",
)
def _chat_with_step_maps(stock: Any) -> Any:
    async def chat_completion_full_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        last: list[Any] = []
        response = await stock(self, request, _noting(result_generator, last), *args, **kwargs)
        if last:
            _add_step_maps(response, last[0].outputs)
        return response

    return chat_completion_full_generator


async def _noting(outputs: AsyncIterator[Any], last: list[Any]) -> AsyncGenerator[Any, None]:
    async for output in outputs:
        last[:] = [output]
        yield output


@replaces(
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.request_output_to_completion_response",
    reason="Adds step maps and traces to the choices of a whole completion.",
    until="A plugin may add fields to a choice.",
)
def _completion_with_step_maps(stock: Any) -> Any:
    def request_output_to_completion_response(
        self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        response = stock(self, final_res_batch, *args, **kwargs)
        _add_step_maps(response, [output for res in final_res_batch for output in res.outputs])
        return response

    return request_output_to_completion_response


def _add_step_maps(response: Any, completions: list[Any]) -> None:
    """Say in each choice which steps decided its tokens, and from what, where that was asked for."""
    for choice, completion in zip(getattr(response, "choices", ()), completions, strict=False):
        if hasattr(completion, STEP_MAP):
            setattr(choice, STEP_MAP, list(getattr(completion, STEP_MAP)))
        if hasattr(completion, TRACE):
            setattr(choice, TRACE, getattr(completion, TRACE))
