"""Fast-dLLM v2: a block's sub-blocks from left to right, over logits shifted by one.

Source: ``modeling.py`` of Efficient-Large-Model/Fast_dLLM_v2 as found in public copies; the chat
script is NVlabs/Fast-dLLM ``v2/run_chatbot.py`` at b9cf368 (threshold 0.9).
"""

from collections.abc import Sequence

import torch

from tests.support.families.run import (
    Model,
    Pass,
    Run,
    Sample,
    block_causal,
    block_draws,
    cut,
    draw,
    most_confident,
    multinomial,
)


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    mask_id: int = 151665,
    threshold: float = 1.0,
    small_block_size: int = 8,
    block_size: int = 32,
    stop_token: int = 151645,
    top_p: float = 0.95,
    temperature: float = 0.0,
    sample: Sample = multinomial,
) -> Run:
    """``max_new_tokens // block_size`` blocks, of which the first holds the prompt's remainder.

    The row of a token is that of the position before it; a block's own first row stands for its
    first position too, which is never a mask. The first token of a block is a seed: the most likely
    token after the last row of the pass that wrote the block before, be it prompt or generated. It
    is so at any temperature. Sub-blocks are filled from left to right; every step sees the whole
    block and reveals, in its sub-block, each mask whose probability is above the threshold and the
    best one. A block without masks is forwarded once more, which gives the next seed; the last
    one's is returned too. A stop token among the tokens that this block drew, with no mask between
    them and it, ends the generation, and the result ends with the first stop token; a seed that is
    one ends it before the next block.

    Differs from the publisher's:

    - A prompt of exactly one block is prefilled. There it is not (the comparison is ``>``), and the
      blocks after it are written as if nothing were before them.
    - ``use_block_cache`` is left out: with it other sub-blocks' keys and values are those of an
      earlier step, which is an approximation.
    - Among equally confident positions the leftmost is taken first.
    """
    run = Run()
    prompt_length = len(prompt_ids)
    x = torch.tensor(prompt_ids, dtype=torch.long)
    revealed = torch.full_like(x, -1)
    prefilled = prompt_length // block_size * block_size
    if prefilled:
        run.passes.append(Pass("prefill", 0, 0))
        if prefilled == prompt_length:
            logits = model(x, block_causal(prompt_length, block_size))
            x = torch.cat([x, logits[-1:].argmax(-1)])
            revealed = torch.cat([revealed, torch.tensor([-1])])
    for canvas in range(max_new_tokens // block_size):
        if stop_token in x[prompt_length:].tolist():
            break
        known = len(x)
        end = known // block_size * block_size + block_size
        start = end - block_size
        x = torch.cat([x, torch.full((end - known,), mask_id)])
        revealed = torch.cat([revealed, torch.full((end - known,), -1)])
        visible = block_causal(end, block_size)
        stopped = False
        step = 0
        for sub in range(start, end, small_block_size):
            rows = slice(sub, sub + small_block_size)
            while not stopped and (masked := x[rows] == mask_id).any():
                run.passes.append(Pass("denoise", start, int((x[start:] == mask_id).sum())))
                block_logits = model(x, visible)[start:]
                shifted = torch.cat([block_logits[:1], block_logits[:-1]])
                logits = shifted[sub - start : sub - start + small_block_size]
                draws = block_draws(
                    canvas, step, range(sub - start, sub - start + small_block_size)
                )
                tokens, p = draw(logits, temperature, 0, top_p, sample, draws)
                reveal = (masked & (p > threshold)) | most_confident(p, masked, 1)
                x[rows][reveal] = tokens[reveal]
                revealed[rows][reveal] = step
                step += 1
                drawn = x[known:].tolist()
                stopped = stop_token in drawn and mask_id not in drawn[: drawn.index(stop_token)]
        if stopped:
            break
        run.passes.append(Pass("commit", start, 0))
        logits = model(x, visible)
        x = torch.cat([x, logits[-1:].argmax(-1)])
        revealed = torch.cat([revealed, torch.tensor([-1])])
    run.tokens = cut(x[prompt_length:].tolist(), [stop_token])
    run.revealed = revealed[prompt_length:].tolist()[: len(run.tokens)]
    return run
