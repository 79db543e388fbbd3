"""Parsing of a canvas with a chat's reasoning and tool parsers, as they will parse its tokens."""

from __future__ import annotations

import copy
from typing import Any

from vllm.logger import init_logger

from vllm_diffusion.live.frame import StreamedFrame

logger = init_logger(f"vllm.{__name__}")


class ParsedAnswers:
    """Follows the answers of one chat with vLLM's parsers, as the stream of its deltas does.

    Parsing goes on from a copy of an answer's parser for each frame, so that the last frame of a canvas
    shows what its delta brings.
    """

    def __init__(self, serving: Any, request: Any, tokenizer: Any, template_kwargs: Any) -> None:
        """Make a parser for each answer.

        Args:
            serving: vLLM's ``OpenAIServingChat``, with a parser.
            request: The chat's.
            tokenizer: The model's.
            template_kwargs: Arguments of the chat template.
        """
        from vllm.entrypoints.openai.chat_completion.stream_processor import ChatStreamProcessor

        self._answers = [
            ChatStreamProcessor(
                request,
                serving._make_parser(request, tokenizer, template_kwargs),
                enable_auto_tools=serving.enable_auto_tools,
                parser_cls=serving.parser_cls,
            )
            for _ in range(request.n or 1)
        ]
        self._offsets = [0] * len(self._answers)
        # A copy of a parser shares what may be large, and does not change.
        tools = request.tools or ()
        shared = (request, tools, *tools, tokenizer, tokenizer.get_vocab(), serving.model_config)
        self._shared = {id(value): value for value in shared}

    def take(self, output: Any) -> None:
        """Parse tokens that are committed.

        Args:
            output: vLLM's ``RequestOutput`` with deltas.
        """
        for answer in output.outputs:
            delta = self._delta(
                self._answers[answer.index],
                answer.text,
                list(answer.token_ids),
                answer.finish_reason,
                output.prompt_token_ids,
            )
            self._offsets[answer.index] += len(delta.get("content") or "")

    def shown(self, frame: StreamedFrame, prompt_token_ids: list[int]) -> dict[str, Any]:
        """Return a frame's ``offset``, ``text``, ``reasoning`` and ``tool_calls``.

        Args:
            frame: The frame.
            prompt_token_ids: The chat's prompt.
        """
        ahead = copy.deepcopy(self._answers[frame.index], dict(self._shared))
        delta = self._delta(
            ahead,
            frame.withheld + frame.text,
            list(frame.answer_token_ids),
            "stop" if frame.ends_answer else None,
            prompt_token_ids,
        )
        return {
            "offset": self._offsets[frame.index],
            "text": delta.get("content") or "",
            "reasoning": delta.get("reasoning"),
            "tool_calls": [_without_id(call) for call in delta.get("tool_calls") or ()] or None,
        }

    def _delta(self, answer: Any, *chunk: Any) -> dict[str, Any]:
        """Parse one more chunk of an answer; nothing where the parser fails or waits for more."""
        try:
            delta = answer.step(*chunk).delta
        except Exception:
            # Parsers are many, and of others. An unfinished canvas is no text that one was made for,
            # and what one makes of the answer is vLLM's to report.
            logger.debug("A parser failed on a canvas.", exc_info=True)
            return {}
        return {} if delta is None else delta.model_dump(exclude_unset=True, exclude_none=True)


def _without_id(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call without its name, which is drawn when the call is committed."""
    return {name: value for name, value in call.items() if name != "id"}
