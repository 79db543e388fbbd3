"""Endpoints of vLLM's OpenAI server, by which every body comes to the engine.

vLLM's server keeps one object for each endpoint. Before the server answers its first request, each
of them is given a subclass of ours, which reads more of a body, refuses what would be ignored, and
what the engine would refuse before a response begins: :func:`refused_first`. Those that send frames
have a subclass in ``live/http.py``. :class:`CheckedModels` refuses an adapter that would end the
engine.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from http import HTTPStatus
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
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from vllm_diffusion.requests.arguments import TRACE, WHERE_FRAMES_ARE, check_watched
from vllm_diffusion.requests.client import noting_streams
from vllm_diffusion.requests.constraint import read_constraint_aside
from vllm_diffusion.requests.http import (
    DETAILS,
    check_fields,
    num_answers,
    read_body,
)
from vllm_diffusion.requests.refusals import ending_with_refusal, refuse
from vllm_diffusion.requests.tool_calls.read_tools import read_tools_aside
from vllm_diffusion.weights.adapters.early_checks import support_of

_WHERE_TRACES_ARE = (
    "comes with whole answers of /v1/chat/completions and /v1/completions: leave stream out, or "
    "leave it out."
)


async def refused_first(served: Any, response: Awaitable[Any]) -> Any:
    """Await an endpoint's response, and check a stream's requests before it begins: once it has,
    its status is 200 whatever the engine refuses.

    Args:
        served: The endpoint's object.
        response: What it answers.
    """
    with noting_streams() as requests:
        events = await response
        if isinstance(events, AsyncGenerator):
            try:
                for request in requests:
                    await served.engine_client.check(*request)
            except BaseException:
                await events.aclose()
                raise
    return events


class _ParametersFirst(OpenAIServingChat):
    """Chats that check sampling parameters before they process pictures.

    vLLM takes a processed picture for one that the engine has. If the request is then refused,
    ``pictures.py`` takes that back, but until then other requests with the same picture would be
    sent without it.
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


class CheckedChat(_ParametersFirst):
    """``/v1/chat/completions``."""

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        _read_diffusing(request, self.model_config)
        return await refused_first(self, super().create_chat_completion(request, raw_request))


class CheckedCompletions(OpenAIServingCompletion):
    """``/v1/completions``."""

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        _read_diffusing(request, self.model_config)
        return await refused_first(self, super().create_completion(request, raw_request))


class CheckedChatBatch(_ParametersFirst, OpenAIServingChatBatch):
    """``/v1/chat/completions/batch``, which cannot send frames."""

    async def create_batch_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        _refuse_frames(request, self.model_config)
        for messages in request.messages:
            self._check_parameters(request.to_chat_completion_request(messages))
        return await super().create_batch_chat_completion(request, raw_request)


class CheckedMessages(_ParametersFirst, AnthropicServingMessages):
    """``/v1/messages``, which cannot send frames; ``thinking`` turns thinking on."""

    async def create_messages(self, request: Any, raw_request: Any = None) -> Any:
        # vLLM's protocol drops fields that it does not know.
        body = {} if raw_request is None else await raw_request.json()
        _refuse_frames(request, self.model_config, body)
        if body.get("thread"):
            # With these details the SDKs send the whole conversation.
            raw_request.scope[DETAILS] = {"error_code": "thread_unsupported_request"}
            refuse("thread", "is not supported: send the whole conversation in messages.")
        return await refused_first(self, super().create_messages(request, raw_request))

    @classmethod
    def _handle_thinking(cls, req: Any, anthropic_request: Any, *args: Any, **kwargs: Any) -> None:
        """Have the chat template let the model think, where vLLM sets no more than the budget."""
        super()._handle_thinking(req, anthropic_request, *args, **kwargs)
        thinking = anthropic_request.thinking
        if thinking is not None and thinking.type != "disabled":
            req.chat_template_kwargs = {"enable_thinking": True, **(req.chat_template_kwargs or {})}


class CheckedResponses(OpenAIServingResponses):
    """``/v1/responses``, which cannot send frames; a stream that is refused ends with an event."""

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        _refuse_frames(request, self.model_config)
        # As for chats, before pictures are processed.
        most = self.model_config.max_model_len
        params = request.to_sampling_params(most, self.default_sampling_params)
        # vLLM asks the engine when the first event of a stream is awaited.
        await self.engine_client.check({}, params)
        await read_tools_aside(request.tools)
        response = await super().create_responses(request, raw_request)
        # Where a stream has begun, a refusal comes too late for its status.
        return ending_with_refusal(response) if isinstance(response, AsyncGenerator) else response


class CheckedDecisions(OpenAIServingDecisions):
    """``/v1/decisions``, which names a question that has more options than can be read."""

    async def create_decisions(self, request: Any, raw_request: Any = None) -> Any:
        most = min(self.limits.max_options, len(LABELS))
        for i, question in enumerate(request.questions):
            num = len(getattr(question, "choices", ()) or getattr(question, "levels", ()))
            if num > most:
                name = "" if question.name is None else f" ({question.name})"
                refuse(
                    "questions",
                    f"may have up to {most} options each; question {i}{name} has {num}. Split it.",
                )
        return await super().create_decisions(request, raw_request)


class CheckedRender(ServingRender):
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
        support = support_of(self.model_config)
        if refusal is not None or support is None:
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
            await asyncio.to_thread(support.check_loading, request.lora_name, request.lora_path)
        except ValueError as error:
            return create_error_response(
                message=f"lora_path {error}",
                err_type="BadRequestError",
                status_code=HTTPStatus.BAD_REQUEST,
                param="lora_path",
            )
        return None


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
        refuse("diffusing", "must be true or false.", diffusing)
    if diffusing:
        request.vllm_xargs = {"diffusion_frames": 1, **(request.vllm_xargs or {})}
    xargs = request.vllm_xargs or {}
    check_watched(xargs.get("diffusion_frames"), num_answers(request))
    if request.stream and xargs.get(TRACE):
        refuse(TRACE, _WHERE_TRACES_ARE, xargs[TRACE])


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
    sent = {**(xargs if isinstance(xargs, dict) else {}), "diffusing": unknown.get("diffusing")}
    for field in ("diffusing", "diffusion_frames", TRACE):
        if value := sent.get(field):
            refuse(field, _WHERE_TRACES_ARE if field == TRACE else WHERE_FRAMES_ARE, value)
