"""MinerU-Diffusion: SDAR's rule on blocks that are counted from the end of the prompt.

Source: ``mineru_diffusion/modeling_mineru_diffusion.py`` of opendatalab/MinerU-Diffusion at
8d456f1, with the settings of ``engines/hf/runner.py``.
"""

from collections.abc import Sequence

import torch

from tests.support.families.bd3lm import visible_of
from tests.support.families.run import (
    Model,
    Pass,
    Run,
    Sample,
    block_draws,
    draw,
    entropy_of,
    even_schedule,
    most_confident,
    multinomial,
    num_affordable,
)


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    mask_id: int = 151669,
    gen_length: int = 1024,
    block_length: int = 32,
    denoising_steps: int = 32,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    remasking_strategy: str = "low_confidence_dynamic",
    confidence_threshold: float = 0.95,
    entropy_budget: float = 0.1,
    sample: Sample = multinomial,
) -> Run:
    """Blocks after the prompt; a step reveals what SDAR's does. No end token ends it.

    Differs from the publisher's as SDAR's reference loop does from its own, and: the last block is
    as short as what is left of ``gen_length``, where that loop takes whole blocks alone; it has no
    strategy but the default.
    """
    run, num_prompt = Run(), len(prompt_ids)
    run.passes.append(Pass("prefill", 0, 0))
    x = torch.tensor(prompt_ids, dtype=torch.long)
    for block in range(-(-gen_length // block_length)):
        start = len(x)
        length = min(block_length, num_prompt + gen_length - start)
        x = torch.cat([x, torch.full((length,), mask_id)])
        revealed = torch.full((length,), -1)
        visible = visible_of(len(x), num_prompt, block_length)
        for step, least in enumerate(even_schedule(length, denoising_steps)):
            masked = x[start:] == mask_id
            if not masked.any():
                break
            run.passes.append(Pass("denoise", start, int(masked.sum())))
            logits = model(x, visible)[start:]
            draws = block_draws(block, step, range(length))
            tokens, p = draw(logits, temperature, top_k, top_p, sample, draws)
            if remasking_strategy == "sequential":
                reveal = masked & (masked.cumsum(0) <= least)
            elif remasking_strategy in ("entropy", "entropy_budget"):
                entropy, count = entropy_of(logits, temperature), least
                if remasking_strategy == "entropy_budget":
                    count = max(count, num_affordable(entropy[masked], entropy_budget))
                reveal = most_confident(-entropy, masked, count)
            else:
                reveal = most_confident(p, masked, least)
                confident = masked & (p > confidence_threshold)
                if remasking_strategy == "low_confidence_dynamic" and confident.sum() >= least:
                    reveal = confident
            x[start:] = torch.where(reveal, tokens, x[start:])
            revealed[reveal] = step
        run.passes.append(Pass("commit", start, 0))
        run.revealed += revealed.tolist()
    run.tokens = x[num_prompt:].tolist()
    return run
