"""BD3LM: block diffusion over a Qwen3, in blocks that are counted from the end of the prompt.

Source: ``dllm/core/samplers/bd3lm.py`` and ``utils.py`` of ZHZisZZ/dllm at ca17675.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tests.support.families.run import (
    Choose,
    Model,
    Pass,
    Run,
    Sample,
    by_probability,
    denoise,
    multinomial,
)


def visible_of(length: int, num_prompt: int, block_length: int) -> Tensor:
    """[length, length]: each position sees its whole block and the earlier ones."""
    block = (torch.arange(length) - num_prompt).div(block_length, rounding_mode="floor")
    return block[:, None] >= block[None, :]


def schedule(num_masks: int, steps: int) -> list[int]:
    """How many masks each step reveals; steps that reveal none are left out.

    A step from time t to s reveals the part 1 - s / t of what is left. A time is rounded to
    float32, and so are the mask ratio 1 - (1 - time) and the quotient of two of them; the product
    with the part is float64's, and rounded half to even.
    """
    one, numbers = np.float32(1), []
    for left in range(steps, 0, -1):
        end, start = (one - (one - np.float32(n / steps)) for n in (left - 1, left))
        number = int(np.round(num_masks * (1 - float(end / start))))
        num_masks -= number
        numbers.append(number)
    return [number for number in numbers if number]


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 128,
    block_size: int = 32,
    steps_per_block: int = 32,
    temperature: float = 0.0,
    mask_id: int = 151669,
    threshold: float | None = None,
    sample: Sample = multinomial,
) -> Run:
    """One request without padding; the last block is as short as what is left of
    ``max_new_tokens``.

    A step reveals its part of the block's masks (:func:`schedule`), those whose token is most
    probable at temperature 1. No end token ends it.

    Differs from the publisher's: candidates are drawn from softmax(logits / temperature) directly,
    probabilities are float64, the leftmost of equals comes first, the ends of answers are cut by
    the caller, and a ``threshold`` reveals every mask that is not below it, one at least.
    """
    return blocks_after(
        model,
        prompt_ids,
        partial(by_probability, temperature=temperature, sample=sample, threshold=threshold),
        num_tokens=max_new_tokens,
        block_length=block_size,
        mask_id=mask_id,
        schedule=lambda length: schedule(length, steps_per_block),
    )


def blocks_after(
    model: Model,
    prompt_ids: Sequence[int],
    choose: Choose,
    *,
    num_tokens: int,
    block_length: int,
    mask_id: int,
    schedule: Callable[[int], list[int]],
) -> Run:
    """Denoise blocks after the prompt one after another, the last as short as what is left."""
    run, num_prompt = Run(), len(prompt_ids)
    x = torch.tensor(prompt_ids, dtype=torch.long)
    run.passes.append(Pass("prefill", 0, 0))
    end = num_prompt + num_tokens
    for canvas, start in enumerate(range(num_prompt, end, block_length)):
        length = min(block_length, end - start)
        x = torch.cat([x, torch.full((length,), mask_id)])
        revealed = torch.full((length,), -1)
        visible, rows = visible_of(len(x), num_prompt, block_length), slice(start, len(x))
        steps = schedule(length)
        denoise(run, model, mask_id, choose, x, visible, rows, revealed, steps, canvas)
        run.passes.append(Pass("commit", start, 0))
        run.revealed += revealed.tolist()
    run.tokens = x[num_prompt:].tolist()
    return run
