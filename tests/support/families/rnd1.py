"""RND1: a Qwen3-MoE that attends in both directions over prompt and answer, revealed by entropy in
even steps.

Source: ``diffusion_sample`` of ``rnd/sampling.py`` of RadicalNumerics/RND1 at 87d5f46.
"""

from collections.abc import Sequence

import torch

from tests.support.families.run import (
    Model,
    Pass,
    Run,
    Sample,
    block_draws,
    draw,
    filtered,
    most_confident,
    multinomial,
)


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    num_steps: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    mask_id: int = 151669,
    pad_id: int = 151643,
    suffix_ids: Sequence[int] = (),
    sample: Sample = multinomial,
) -> Run:
    """All masks but the last position, which holds padding; logits are shifted by one.

    A temperature below 1e-8 is that. The tokens are those of the ``max_new_tokens`` - 1 masks,
    after which the suffix stands and then the padding.

    Differs from the publisher's: a step that reveals nothing is not run, and does not count in the
    keys of draws; entropies are those of what filters keep, where they are NaN there; the leftmost
    of equals is revealed first.
    """
    run, start, num_answer = Run(), len(prompt_ids), max_new_tokens - 1
    x = torch.tensor([*prompt_ids, *[mask_id] * num_answer, *suffix_ids, pad_id])
    revealed = torch.full_like(x, -1)
    everything = torch.ones(len(x), len(x), dtype=torch.bool)
    answer = torch.arange(start, start + num_answer)
    masked = torch.ones(num_answer, dtype=torch.bool)
    for step in range(num_steps - 1, -1, -1):
        num_kept = int(torch.tensor([num_answer]) * (step / num_steps))
        number = int(masked.sum()) - num_kept
        if number <= 0:
            continue
        count = len(run.passes)
        run.passes.append(Pass("denoise", start, int(masked.sum())))
        logits = model(x, everything)[answer - 1]
        kept = filtered(logits / max(temperature, 1e-8), top_k, top_p)
        draws = block_draws(0, count, answer.tolist())
        tokens, _ = draw(logits, temperature, top_k, top_p, sample, draws)
        entropy = torch.special.entr(kept.softmax(-1)).sum(-1)
        chosen = most_confident(-entropy, masked, number)
        x[answer] = torch.where(chosen, tokens, x[answer])
        revealed[answer[chosen]] = count
        masked &= ~chosen
    run.tokens, run.revealed = x[answer].tolist(), revealed[answer].tolist()
    return run
