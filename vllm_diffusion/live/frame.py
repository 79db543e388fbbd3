"""What is shown of a canvas, with the text that its tokens would add to the answer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_diffusion.canvas.report import ReportedFrame


@dataclass(frozen=True)
class CanvasFrame:
    """A canvas as it stands after a denoising step.

    Attributes:
        index: Of the answer among the ``n`` of its prompt.
        prompt_index: Of the prompt among those of the call.
        block: Canvases of the answer before this one.
        step: From 1 on.
        total: The step cap.
        offset: Where in the answer's text the canvas begins, in characters.
        text: What the canvas would add to it if it were committed as it is.
        is_last: Whether the canvas is done; its tokens follow.
        begins_anew: Whether an earlier frame of this canvas was of one that was lost: the request was
            preempted, and denoises the canvas again.
        token_ids: Of all of its positions; ``None`` if not asked for, as those below.
        tokens: The text of each by itself, as ``logprobs`` spell it, special tokens too; ``None`` also
            where the request is not to be detokenized.
        kept: Positions whose token enters the next step as it is.
        entropy: Of each position's distribution, in nats.
    """

    index: int
    prompt_index: int
    block: int
    step: int
    total: int
    offset: int
    text: str
    is_last: bool
    begins_anew: bool
    token_ids: tuple[int, ...] | None = None
    tokens: tuple[str, ...] | None = None
    kept: tuple[bool, ...] | None = None
    entropy: tuple[float, ...] | None = None


@dataclass(frozen=True)
class CanvasStepMap:
    """The steps that decided the tokens of a canvas that was committed.

    Attributes:
        index: Of the answer among the ``n`` of its prompt.
        prompt_index: Of the prompt among those of the call.
        block: Canvases of the answer before this one.
        steps: For each of its tokens, from 1 on; 0 for one that was known before the first step.
    """

    index: int
    prompt_index: int
    block: int
    steps: tuple[int, ...]


def frame_of(
    reported: ReportedFrame, fields: tuple[str, ...], state: Any, prompt_index: int
) -> CanvasFrame:
    """A frame for whoever watches.

    Args:
        reported: By the engine.
        fields: What it holds besides its text.
        state: vLLM's state of the request, as its committed tokens left it.
        prompt_index: Of its prompt.
    """
    tokens: list[int] = np.frombuffer(reported.tokens, np.int32).tolist()
    kept = np.frombuffer(reported.kept, np.uint8)
    entropy = np.frombuffer(reported.entropy, np.float32)
    return CanvasFrame(
        index=state.request_index,
        prompt_index=prompt_index,
        block=reported.block,
        step=reported.step,
        total=reported.max_steps,
        offset=len(_text_of(state.detokenizer)),
        text=_text_after(state.detokenizer, tokens[: reported.num_shown], reported.is_ended),
        is_last=reported.is_last,
        begins_anew=reported.begins_anew,
        token_ids=tuple(tokens) if "token_ids" in fields else None,
        tokens=_texts(state, tokens) if "tokens" in fields else None,
        kept=tuple(kept.astype(bool).tolist()) if "kept" in fields else None,
        entropy=tuple(entropy.tolist()) if "entropy" in fields else None,
    )


def _texts(state: Any, token_ids: list[int]) -> tuple[str, ...] | None:
    """Each token's text by itself; ``None`` without a tokenizer."""
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

    tokenizer = state.logprobs_processor.tokenizer
    return None if tokenizer is None else tuple(convert_ids_list_to_tokens(tokenizer, token_ids))


def _text_after(detokenizer: Any, token_ids: list[int], is_ended: bool) -> str:
    """What the answer's own detokenizer would make of more tokens, which it is not told of.

    Args:
        detokenizer: vLLM's, of the answer.
        token_ids: The tokens that would follow.
        is_ended: Whether the last of them ends the request.
    """
    ahead = copy.copy(detokenizer)
    for name, value in vars(detokenizer).items():
        if isinstance(value, list) or name == "stream":
            setattr(ahead, name, copy.copy(value))
    ahead.update(token_ids, is_ended)
    return _text_of(ahead)[len(_text_of(detokenizer)) :]


def _text_of(detokenizer: Any) -> str:
    """What it has made so far; nothing for a request that is not to be detokenized."""
    text: str = getattr(detokenizer, "output_text", "")
    return text
