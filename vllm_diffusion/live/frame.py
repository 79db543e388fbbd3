"""Frames of a canvas, with the text that its tokens would add to the answer, and how a chat's
parsers read it.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm_diffusion.canvas.messages import ReportedFrame

# Without vLLM's own way to it: who imports this before vLLM may still set vLLM's variables.
logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True)
class CanvasFrame:
    """Canvas after a denoising step.

    Attributes:
        index: Place of the answer among the ``n`` of its prompt.
        prompt_index: Place of the prompt among the prompts of the call.
        block: Canvases of the answer before this one.
        step: Number of the step, from 1 on. A constraint may hold a canvas beyond ``total``.
        total: Step cap of the canvas.
        offset: Position of the canvas's start in the answer's text, in characters.
        text: Text that the canvas would add if it were emitted as it is, before a chat's parsers.
        answer_token_ids: Tokens that it would add: up to an end token, a stop string, a detected
            repetition, ``max_tokens`` or, for a verified draft, the first rejected token.
        ends_answer: True if the answer would end with them.
        is_last: True if the canvas is emitted as it is; its tokens follow.
        begins_anew: True if an earlier frame showed this canvas before it was lost: the request was
            preempted, and denoises the canvas again.
        token_ids: Tokens of all its positions; ``None`` if not requested, like the fields below.
        tokens: Text of each token by itself, spelled as in ``logprobs``, special tokens too;
            ``None`` also if the request is not detokenized.
        kept: Positions whose token enters the next step as it is.
        entropy: Entropy of each position's distribution, in nats.
    """

    index: int
    prompt_index: int
    block: int
    step: int
    total: int
    offset: int
    text: str
    answer_token_ids: tuple[int, ...]
    ends_answer: bool
    is_last: bool
    begins_anew: bool
    token_ids: tuple[int, ...] | None = None
    tokens: tuple[str, ...] | None = None
    kept: tuple[bool, ...] | None = None
    entropy: tuple[float, ...] | None = None

    def event_fields(self) -> dict[str, Any]:
        """Return what a chunk of a stream holds in addition to its empty choice; ``None`` is left
        out there.
        """
        return {
            "type": "diffusion_frame",
            "block": self.block,
            "step": self.step,
            "total": self.total,
            "offset": self.offset,
            "text": self.text,
            "num_tokens": len(self.answer_token_ids),
            "is_last": self.is_last,
            "begins_anew": self.begins_anew,
            "token_ids": self.token_ids,
            "tokens": self.tokens,
            "kept": self.kept,
            "entropy": None if self.entropy is None else [round(e, 4) for e in self.entropy],
        }


@dataclass(frozen=True)
class StreamedFrame(CanvasFrame):
    """Frame of an answer that is sent while it is written.

    Attributes:
        withheld: Text before it that deltas have not sent yet, since a stop string may begin in it.
    """

    withheld: str = ""


@dataclass(frozen=True)
class CanvasStepMap:
    """The steps that decided the tokens of a canvas that was emitted.

    Attributes:
        index: Place of the answer among the ``n`` of its prompt.
        prompt_index: Place of the prompt among the prompts of the call.
        block: Canvases of the answer before this one.
        steps: The step of each of its tokens, from 1 on; 0 for one that was known before the first
            step.
    """

    index: int
    prompt_index: int
    block: int
    steps: tuple[int, ...]

    def event_fields(self) -> dict[str, Any]:
        """Return what a chunk of a stream holds in addition to its empty choice."""
        return {"type": "diffusion_step_map", "block": self.block, "steps": self.steps}


def frame_of(
    reported: ReportedFrame, fields: tuple[str, ...], state: Any, prompt_index: int
) -> StreamedFrame:
    """Make a frame for the client.

    Args:
        reported: Report of the engine.
        fields: Fields of the frame besides its text.
        state: vLLM's state of the request after its emitted tokens.
        prompt_index: Place of the prompt in the call.
    """
    tokens: list[int] = np.frombuffer(reported.tokens, np.int32).tolist()
    kept = np.frombuffer(reported.kept, np.uint8)
    entropy = np.frombuffer(reported.entropy, np.float32)
    addition = added_by(state.detokenizer, tokens[: reported.num_shown], reported.is_stopped)
    # The end of its text that waits for more tokens.
    length: int = getattr(state.detokenizer, "stop_buffer_length", 0)
    return StreamedFrame(
        index=state.request_index,
        prompt_index=prompt_index,
        block=reported.block,
        step=reported.step,
        total=reported.max_steps,
        offset=len(_text_of(state.detokenizer)),
        text=addition.text,
        withheld=_text_of(state.detokenizer)[-length:] if length else "",
        answer_token_ids=tuple(tokens[: addition.num_tokens]),
        ends_answer=reported.is_ended or addition.is_stopped,
        is_last=reported.is_last,
        begins_anew=reported.begins_anew,
        token_ids=tuple(tokens) if "token_ids" in fields else None,
        tokens=_texts(state, tokens) if "tokens" in fields else None,
        kept=tuple(kept.astype(bool).tolist()) if "kept" in fields else None,
        entropy=tuple(entropy.tolist()) if "entropy" in fields else None,
    )


class Addition(NamedTuple):
    """Text that tokens add to an answer.

    Attributes:
        text: Text of the tokens; a special token may have none.
        num_tokens: Number of tokens up to the end of a stop string.
        is_stopped: True if there is a stop string.
    """

    text: str
    num_tokens: int
    is_stopped: bool


def added_by(detokenizer: Any, token_ids: list[int], is_stopped: bool) -> Addition:
    """Detokenize further tokens with a copy of the answer's detokenizer, which stays as it is.

    Args:
        detokenizer: vLLM's detokenizer of the answer.
        token_ids: Tokens that would follow.
        is_stopped: True if the request stops at the last of them.
    """
    ahead = copy.copy(detokenizer)
    for name, value in vars(detokenizer).items():
        if isinstance(value, list) or name == "stream":
            setattr(ahead, name, copy.copy(value))
    stop_string = ahead.update(list(token_ids), is_stopped)
    return Addition(
        _text_of(ahead)[len(_text_of(detokenizer)) :],
        ahead.num_output_tokens() - detokenizer.num_output_tokens(),
        stop_string is not None,
    )


def _texts(state: Any, token_ids: list[int]) -> tuple[str, ...] | None:
    """Return each token's text by itself; ``None`` without a tokenizer."""
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

    tokenizer = state.logprobs_processor.tokenizer
    return None if tokenizer is None else tuple(convert_ids_list_to_tokens(tokenizer, token_ids))


def _text_of(detokenizer: Any) -> str:
    """Return what it has made so far; nothing for a request that is not to be detokenized."""
    text: str = getattr(detokenizer, "output_text", "")
    return text


class ParsedAnswers:
    """Follows the answers of one chat with vLLM's parsers, as the stream of its deltas does.

    Parsing goes on from a copy of an answer's parser for each frame, so that the last frame of a
    canvas shows what its delta brings.
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
        """Parse tokens that are emitted.

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
            # Without the name of a call, which is drawn when the call is emitted.
            "tool_calls": [
                {name: value for name, value in call.items() if name != "id"}
                for call in delta.get("tool_calls") or ()
            ]
            or None,
        }

    def _delta(self, answer: Any, *chunk: Any) -> dict[str, Any]:
        """Parse one more chunk of an answer; nothing where the parser fails or waits for more."""
        try:
            delta = answer.step(*chunk).delta
        except Exception:
            # Parsers are many, and of others. An unfinished canvas is not text that one was made
            # for, and what one makes of the answer is vLLM's to report.
            logger.debug("A parser failed on a canvas.", exc_info=True)
            return {}
        return {} if delta is None else delta.model_dump(exclude_unset=True, exclude_none=True)
