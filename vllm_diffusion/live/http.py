"""Frames and step maps in the responses of vLLM's OpenAI server.

A frame is a chunk of the stream whose delta is empty, which clients skip, with what is shown beside
it. Committed text stays in ordinary deltas.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm_diffusion.live.delivery import STEP_MAP, TRACE, WHERE_FRAMES_ARE
from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap
from vllm_diffusion.live.watch import watch_async
from vllm_diffusion.replacement import replace
from vllm_diffusion.requests.params import parse_shown
from vllm_diffusion.requests.refused_streams import ending_with_refusals

_WHERE_TRACES_ARE = (
    "comes with whole answers of /v1/chat/completions and /v1/completions: leave stream out, or "
    "leave it out."
)


def install() -> None:
    """Send frames on the two endpoints that stream completions. Safe to call twice."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    replace(ChatCompletionRequest, "to_sampling_params", _reading_diffusing)
    replace(CompletionRequest, "to_sampling_params", _reading_diffusing)
    replace(OpenAIServingChat, "chat_completion_stream_generator", _chat_with_frames)
    replace(OpenAIServingCompletion, "completion_stream_generator", _completion_with_frames)
    replace(OpenAIServingChat, "chat_completion_full_generator", _chat_with_step_maps)
    replace(
        OpenAIServingCompletion,
        "request_output_to_completion_response",
        _completion_with_step_maps,
    )
    # Where a stream has begun, a refusal comes too late for its status.
    replace(
        OpenAIServingResponses,
        "create_responses",
        lambda stock: ending_with_refusals(_without_frames(stock)),
    )
    replace(AnthropicServingMessages, "create_messages", _without_frames)
    replace(OpenAIServingChatBatch, "create_batch_chat_completion", _without_frames)


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


def _sends_more(request: Any) -> bool:
    """Whether the request, which was checked, asks for frames or for a step map."""
    return bool(parse_shown(request.vllm_xargs))


def _chat_with_frames(stock: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    def chat_completion_stream_generator(
        self: Any,
        request: Any,
        result_generator: Any,
        request_id: str,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        stream = stock(self, request, result_generator, request_id, model_name, *args, **kwargs)
        # Others are made of its stream, in formats that have no frames.
        if type(self) is not OpenAIServingChat or not _sends_more(request):
            return stream
        head = {"id": request_id, "object": "chat.completion.chunk", "model": model_name}
        return _with_events(stream, [request_id], head, {"delta": {}}, request.n or 1)

    return chat_completion_stream_generator


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
        stream = stock(
            self,
            request,
            engine_inputs,
            result_generator,
            request_id,
            created_time,
            model_name,
            *args,
            **kwargs,
        )
        if not _sends_more(request):
            return stream
        head = {"id": request_id, "object": "text_completion", "model": model_name}
        request_ids = [f"{request_id}-{i}" for i in range(len(engine_inputs))]
        return _with_events(stream, request_ids, head, {"text": ""}, request.n or 1)

    return completion_stream_generator


async def _with_events(
    stream: AsyncIterator[str],
    request_ids: list[str],
    head: dict[str, Any],
    nothing: dict[str, Any],
    num_answers: int,
) -> AsyncGenerator[str, None]:
    """A stream of server-sent events, with one for each frame and step map.

    Args:
        stream: vLLM's.
        request_ids: With which the engine was called, one for each prompt.
        head: Of a chunk.
        nothing: Of a choice that says nothing.
        num_answers: To each prompt.
    """
    head["created"] = int(time.time())
    async for event in watch_async(stream, request_ids):
        if isinstance(event, str):
            yield event
            continue
        index = event.prompt_index * num_answers + event.index
        choice = {"index": index, **nothing, "logprobs": None, "finish_reason": None}
        yield f"data: {json.dumps({**head, 'choices': [choice], **_shown(event)})}\n\n"


def _shown(event: CanvasFrame | CanvasStepMap) -> dict[str, Any]:
    """What a chunk holds beside its empty choice."""
    if isinstance(event, CanvasStepMap):
        return {"type": "diffusion_step_map", "block": event.block, "steps": event.steps}
    shown = {
        "type": "diffusion_frame",
        "block": event.block,
        "step": event.step,
        "total": event.total,
        "offset": event.offset,
        "text": event.text,
        "is_last": event.is_last,
        "begins_anew": event.begins_anew,
        "token_ids": event.token_ids,
        "tokens": event.tokens,
        "kept": event.kept,
        "entropy": None if event.entropy is None else [round(e, 4) for e in event.entropy],
    }
    return {name: value for name, value in shown.items() if value is not None}


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
