"""MinerU-Diffusion: SDAR's rule on blocks that are counted from the end of the prompt.

Source: ``mineru_diffusion/modeling_mineru_diffusion.py`` of opendatalab/MinerU-Diffusion at
8d456f1, with the settings of ``engines/hf/runner.py``.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tests.support.families.bd3lm import blocks_after
from tests.support.families.run import Model, Run, even_schedule
from tests.support.families.sdar import by_strategy


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    mask_id: int = 151669,
    gen_length: int = 1024,
    block_length: int = 32,
    denoising_steps: int = 32,
    confidence_threshold: float = 0.95,
    **others: Any,
) -> Run:
    """Blocks after the prompt; a step reveals what SDAR's does. No end token ends it.

    Differs from the publisher's as SDAR's reference loop does from its own, and: the last block is
    as short as what is left of ``gen_length``, but revealed by a whole one's schedule, where that
    loop takes whole blocks alone; it has no strategy but the default.

    ``others`` are arguments of :func:`by_strategy`.
    """
    return blocks_after(
        model,
        prompt_ids,
        partial(by_strategy, confidence_threshold=confidence_threshold, **others),
        num_tokens=gen_length,
        block_length=block_length,
        mask_id=mask_id,
        schedule=lambda _: even_schedule(block_length, denoising_steps),
    )
