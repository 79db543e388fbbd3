"""Stable-DiffCoder: block diffusion over a Llama.

Source: ``modeling_stable_diffcoder.py`` of ByteDance-Seed/Stable-DiffCoder-8B-Instruct, as found in
a public copy, ``generate_block``. Its README (ByteDance-Seed/Stable-DiffCoder at ece1ffb) calls it
with ``threshold=None``, as many steps as tokens, and an end token.
"""

from collections.abc import Sequence
from functools import partial

import torch

from tests.support.families.run import (
    Model,
    Pass,
    Run,
    Sample,
    begin,
    block_causal,
    by_probability,
    denoise,
    even_schedule,
    multinomial,
)


@torch.no_grad()
def generate_block(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 4,
    temperature: float = 0.0,
    mask_id: int = 5,
    threshold: float | None = 0.95,
    eos_id: int | None = None,
    sample: Sample = multinomial,
) -> Run:
    """Blocks from position 0; the first one generated holds the prompt's remainder.

    Exactly ``gen_length`` tokens: after a prompt that ends within a block the last block
    is as much shorter as the first is. ``steps`` is divided by the number of whole blocks. A step
    reveals the most confident mask, and with a ``threshold`` every other whose probability is not
    below it; without one, as many as an even schedule sets. The probability is that of the drawn
    token at temperature 1, in float64. A full block with an end token ends the generation without
    another pass, and every token after the first end token becomes one; other full blocks are
    forwarded once more, which writes their KV.

    Differs from the publisher's:

    - A block that has masks left after its steps is an error. There it stays as it is and its KV is
      never written. It takes fewer steps a block than the block is long, or a drawn mask token.
    - ``shift`` and ``remasking="random"`` are left out; the published configuration uses neither.
    - Candidates are drawn from softmax(logits / temperature) directly, which is what its Gumbel
      noise in float64 amounts to.
    - Among equally confident positions the leftmost is taken first.

    Raises:
        ValueError: If ``gen_length`` is not a multiple of ``block_length``, nor ``steps`` of the
            number of blocks, or masks are left.
    """
    if gen_length % block_length:
        raise ValueError(
            f"gen_length={gen_length} is not a multiple of block_length={block_length}"
        )
    if steps % (gen_length // block_length):
        raise ValueError(f"steps={steps} is not a multiple of {gen_length // block_length} blocks")
    steps_per_block = steps // (gen_length // block_length)
    prompt_length = len(prompt_ids)
    total = prompt_length + gen_length
    run, x, revealed, starts = begin(prompt_ids, gen_length, block_length, mask_id)
    choose = partial(by_probability, temperature=temperature, sample=sample, threshold=threshold)
    for canvas, start in enumerate(starts):
        end = min(start + block_length, total)
        visible, rows = block_causal(end, block_length), slice(start, end)
        # A step of which the schedule reveals none is not run.
        numbers = even_schedule(int((x[rows] == mask_id).sum()), steps_per_block)
        schedule = [number for number in numbers if number]
        denoise(
            run, model, mask_id, choose, x[:end], visible, rows, revealed[rows], schedule, canvas
        )
        if (x[rows] == mask_id).any():
            raise ValueError("masks are left after the block's steps")
        generated = x[prompt_length:end].tolist()
        if eos_id is not None and eos_id in generated:
            x[prompt_length + generated.index(eos_id) : end] = eos_id
            break
        run.passes.append(Pass("commit", start, 0))
    run.tokens = x[prompt_length:end].tolist()
    run.revealed = revealed[prompt_length:end].tolist()
    return run
