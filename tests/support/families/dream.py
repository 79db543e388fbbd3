"""Dream: a Qwen2 that attends in both directions over prompt and answer, revealed by a schedule in
time.

Source: ``sample_tokens`` and ``_sample`` of Dream's ``generation_utils.py``, as ZHZisZZ/dllm has it
at ca17675.
"""

from collections.abc import Sequence

import torch

from tests.support.families.run import (
    Model,
    Pass,
    Run,
    Sample,
    Uniform,
    block_draws,
    draw,
    filtered,
    most_confident,
    multinomial,
    probability,
    torch_uniform,
)


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    steps: int = 512,
    eps: float = 1e-3,
    alg: str = "origin",
    alg_temp: float = 0.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    mask_id: int = 151666,
    sample: Sample = multinomial,
    uniform: Uniform = torch_uniform,
) -> Run:
    """All masks at once; logits are shifted by one. No end token ends it.

    Filters act at temperature 0 too: a token's confidence is that of what they keep.

    Differs from the publisher's: a step that reveals nothing is not run, and does not count in the
    keys of draws; ``alg_temp`` draws by adding Gumbel noise, which is the same law; entropies are
    exact; the leftmost of equals comes first.
    """
    run, start = Run(), len(prompt_ids)
    x = torch.cat(
        [torch.tensor(prompt_ids, dtype=torch.long), torch.full((max_new_tokens,), mask_id)]
    )
    revealed = torch.full_like(x, -1)
    everything = torch.ones(len(x), len(x), dtype=torch.bool)
    times = torch.linspace(1, eps, steps + 1)
    answer = torch.arange(start, len(x))
    for step in range(steps):
        masked = x[answer] == mask_id
        share, is_last = 1 - times[step + 1] / times[step], step == steps - 1
        num_masks = int(masked.sum())
        number = num_masks if is_last else int(torch.tensor(float(num_masks)) * share)
        if num_masks == 0 or (alg != "origin" and number == 0):
            continue
        count = len(run.passes)
        run.passes.append(Pass("denoise", start, num_masks))
        logits = model(x, everything)[answer - 1]
        kept = filtered(logits / (temperature or 1.0), top_k, top_p)
        draws = block_draws(0, count, answer.tolist())
        tokens, _ = draw(logits, temperature, top_k, top_p, sample, draws)
        confidence = probability(kept, tokens)
        if alg == "origin":
            chosen = masked & ((uniform(0, count, answer) < share) | torch.tensor(is_last))
        else:
            if alg == "topk_margin":
                first, second = kept.softmax(dim=-1).topk(2).values.unbind(-1)
                confidence = first - second
            if alg == "entropy":
                confidence = -torch.distributions.Categorical(logits=kept).entropy()
            if alg_temp > 0:
                noise = -torch.log(-torch.log(uniform(0, count, answer)))
                confidence = confidence / alg_temp + noise
            # Above all others, where confidences may be below the least that the choice knows.
            chosen = most_confident(confidence - confidence.min(), masked, number)
        x[answer] = torch.where(chosen, tokens, x[answer])
        revealed[answer[chosen]] = count
    run.tokens, run.revealed = x[start:].tolist(), revealed[start:].tolist()
    return run
