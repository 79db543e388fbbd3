"""SDAR, SDAR-MoE and TraDo: block diffusion with a block-causal cache.

Source: JetAstra/SDAR ``generate.py`` at c2041a8, ``block_diffusion_generate``.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.support.families.run import (
    Draws,
    Model,
    Pass,
    Run,
    Sample,
    begin,
    block_causal,
    denoise,
    draw,
    entropy_of,
    even_schedule,
    most_confident,
    multinomial,
    num_affordable,
)


def by_strategy(
    logits: Tensor,
    masked: Tensor,
    least: int,
    draws: Draws,
    *,
    confidence_threshold: float,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    remasking_strategy: str = "low_confidence_dynamic",
    entropy_budget: float = 0.1,
    sample: Sample = multinomial,
) -> tuple[Tensor, Tensor]:
    """Reveal by one of the strategies that :func:`generate` describes."""
    tokens, p = draw(logits, temperature, top_k, top_p, sample, draws)
    confident = masked & (p > confidence_threshold)
    if remasking_strategy == "sequential":
        reveal = masked & (masked.cumsum(0) <= least)
    elif remasking_strategy == "low_confidence_dynamic" and int(confident.sum()) >= least:
        reveal = confident
    elif remasking_strategy in ("entropy", "entropy_budget"):
        entropy, count = entropy_of(logits, temperature), least
        if remasking_strategy == "entropy_budget":
            count = max(count, num_affordable(entropy[masked], entropy_budget))
        reveal = most_confident(-entropy, masked, count)
    else:
        reveal = most_confident(p, masked, least)
    return tokens, reveal


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    mask_id: int = 151669,
    gen_length: int = 128,
    block_length: int = 8,
    denoising_steps: int = 8,
    confidence_threshold: float = 0.85,
    stopping_criteria_idx: Sequence[int] | None = None,
    **others: Any,
) -> Run:
    """Blocks from position 0; the first one generated holds the prompt's remainder.

    Prompt and ``gen_length`` together are rounded up to whole blocks. Step ``s`` of a block reveals
    ``n[s]`` positions (the block's length spread over the steps): with
    ``low_confidence_static`` the most confident, with ``sequential`` the leftmost, with
    ``low_confidence_dynamic`` every one whose probability is above the threshold if these are at
    least ``n[s]``, else the ``n[s]`` most confident. A block without masks is forwarded once more:
    that pass writes its KV. End tokens are looked for after that, in the answer; what follows
    them in the block is returned too.

    Differs from the publisher's:

    - Temperature 0 takes the most likely token at its plain probability; there it divides by zero.
    - A step reveals masked positions only. There, where ``n[s]`` exceeds the masks left (a prompt's
      remainder, or dynamic steps before it, with fewer steps than the block is long), ``topk`` over
      ``-inf`` also picks decided positions, of the prompt too, and overwrites them.
    - Among equally confident positions the leftmost is taken first.
    - A block that still has masks after all its steps, which takes a drawn mask token, is an error;
      there it is an index out of range.
    - ``entropy_bounded`` is left out: it uses a name that was never assigned. ``entropy`` and
      ``entropy_budget`` are this package's own: the ``n[s]`` of least entropy, or as many more as
      have at most ``entropy_budget`` as their sum without the largest.

    The publisher's evaluation (``opencompass/models/huggingface_bd3.py`` in the same commit)
    differs in one point from this function: its probability is that before ``top_k`` and ``top_p``.

    ``others`` are arguments of :func:`by_strategy`.

    Raises:
        ValueError: If masks are left.
    """
    prompt_length = len(prompt_ids)
    run, x, revealed, starts = begin(prompt_ids, gen_length, block_length, mask_id)
    schedule = even_schedule(block_length, denoising_steps)
    choose = partial(by_strategy, confidence_threshold=confidence_threshold, **others)
    for canvas, start in enumerate(starts):
        end = start + block_length
        visible, rows = block_causal(end, block_length), slice(start, end)
        denoise(
            run, model, mask_id, choose, x[:end], visible, rows, revealed[rows], schedule, canvas
        )
        if (x[rows] == mask_id).any():
            raise ValueError("masks are left after the last step: a mask token was drawn")
        run.passes.append(Pass("commit", start, 0))
        if set(x[prompt_length:end].tolist()) & set(stopping_criteria_idx or ()):
            break
    run.tokens = x[prompt_length:end].tolist()
    run.revealed = revealed[prompt_length:end].tolist()
    return run
