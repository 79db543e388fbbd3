"""Nemotron-Labs-Diffusion: blocks after a causal context, its autoregressive mode, linear_spec.

Source: ``modeling_nemotron_labs_diffusion.py`` of nvidia/Nemotron-Labs-Diffusion, as found in
public copies; mlx-vlm ``models/nemotron_labs_diffusion`` at 9b13f522 does the same.

All three loops share one context: every committed token's KV comes from a causal pass with the
plain weights, and the logits of the last committed position give the next token.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tests.support.families.run import (
    Pass,
    Run,
    Sample,
    block_draws,
    causal,
    causal_then_block,
    cut,
    drawn,
    even_schedule,
    multinomial,
    not_below,
    probability,
    token_draws,
)


class Model(Protocol):
    """As :class:`tests.support.families.run.Model`; ``adapted`` [T], bool, are rows with the
    LoRA.
    """

    def __call__(
        self, ids: Tensor, visible: Tensor, *, adapted: Tensor | None = None
    ) -> Tensor: ...


def _next_tokens(logits: Tensor, first: int, temperature: float, sample: Sample) -> Tensor:
    """Tokens for positions ``first``, ``first + 1``, ... from the logits of the positions
    before.
    """
    return drawn(logits, temperature, sample, token_draws(range(first, first + len(logits))))


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    block_length: int,
    threshold: float | None = None,
    temperature: float = 0.0,
    eos_token_id: int | None = None,
    mask_id: int = 100,
    sample: Sample = multinomial,
) -> Run:
    """Block diffusion with a causal cache; a block starts where the known tokens end.

    The causal pass over the prompt gives the first block's first token, its seed; the causal pass
    over a finished block writes its KV and gives the next block's. The other positions start as
    masks. A step draws for each of them, and keeps the most confident, and with a ``threshold``
    every other whose probability is at least that. Without one, as many as an even schedule over
    ``block_length`` steps sets, which is one a step. The probability is that of the drawn token at
    temperature 1, whatever the temperature. A block ends early at an end token with no mask to its
    left, and is committed as it is; everything is cut after the first end token.

    Differs from the publisher's: ``causal_context=False`` and the thinking budget are left out;
    candidates are drawn from softmax(logits / temperature) directly, which is what its Gumbel
    noise in float64 amounts to; among equally confident positions the leftmost is taken first.

    Raises:
        ValueError: If ``max_new_tokens`` is not a whole number of blocks.
    """
    if max_new_tokens % block_length:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} is not a multiple of block_length={block_length}"
        )
    run = Run()
    x = torch.tensor(prompt_ids, dtype=torch.long)
    run.passes.append(Pass("prefill", 0, 0))
    logits = model(x, causal(len(x)))
    for canvas in range(max_new_tokens // block_length):
        start = len(x)
        # Drawn before the first step, and at no position of the block.
        seed = drawn(logits[-1:], temperature, sample, block_draws(canvas, 0, [block_length]))
        block = torch.cat([seed, torch.full((block_length - 1,), mask_id)])
        revealed = torch.full_like(block, -1)
        schedule = even_schedule(int((block == mask_id).sum()), block_length)
        visible = causal_then_block(start, block_length)
        for step in range(block_length):
            masked = block == mask_id
            if not masked.any():
                break
            run.passes.append(Pass("denoise", start, int(masked.sum())))
            logits = model(torch.cat([x, block]), visible)[start:]
            draws = block_draws(canvas, step, range(block_length))
            tokens = drawn(logits, temperature, sample, draws)
            p = probability(logits, tokens)
            reveal = not_below(p, masked, schedule[step], threshold)
            block[reveal] = tokens[reveal]
            revealed[reveal] = step
            left = cut(block.tolist(), [eos_token_id])
            if left[-1] == eos_token_id and mask_id not in left:
                break
        x = torch.cat([x, block])
        run.passes.append(Pass("commit", start, int((block == mask_id).sum())))
        logits = model(x, causal(len(x)))
        run.revealed += revealed.tolist()
        if eos_token_id in x[len(prompt_ids) :].tolist():
            break
    run.tokens = cut(x[len(prompt_ids) :].tolist(), [] if eos_token_id is None else [eos_token_id])
    run.revealed = run.revealed[: len(run.tokens)]
    return run


@torch.no_grad()
def ar_generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    eos_token_id: int | None = None,
    sample: Sample = multinomial,
) -> Run:
    """One token after another; ends after an end token.

    Differs from the publisher's: the thinking budget is left out.
    """
    run = Run()
    x = torch.tensor(prompt_ids, dtype=torch.long)
    run.passes.append(Pass("prefill", 0, 0))
    for i in range(max_new_tokens):
        if i:
            run.passes.append(Pass("decode", len(x) - 1, 0))
        logits = model(x, causal(len(x)))[-1:]
        token = _next_tokens(logits, len(x), temperature, sample)
        x = torch.cat([x, token])
        if int(token) == eos_token_id:
            break
    run.tokens = x[len(prompt_ids) :].tolist()
    run.revealed = [-1] * len(run.tokens)
    return run


@torch.no_grad()
def linear_spec_generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 128,
    block_length: int = 32,
    temperature: float = 0.0,
    mask_token_id: int = 100,
    eos_token_id: int | None = None,
    sample: Sample = multinomial,
    draft_sample: Sample = multinomial,
) -> Run:
    """Draft a block by diffusion, and verify it (:func:`verified`).

    A draft starts with the next token, which is already certain, and masks. One pass
    (bidirectional, with the LoRA) fills all masks.

    Differs from the publisher's: the thinking budget and a ``threshold`` above 0 are left out;
    drafts are drawn by ``draft_sample``, a generator of their own.
    """

    def draft(x: Tensor, token: Tensor, canvas: int) -> tuple[Tensor, int]:
        start = len(x)
        block = torch.cat([token, torch.full((block_length - 1,), mask_token_id)])
        visible = causal_then_block(start, block_length)
        adapted = torch.arange(start + block_length) >= start
        masked = block == mask_token_id
        logits = model(torch.cat([x, block]), visible, adapted=adapted)[start:]
        draws = block_draws(canvas, 0, range(block_length))
        drafted = drawn(logits, temperature, draft_sample, draws)
        return torch.where(masked, drafted, block), int(masked.sum())

    return verified(
        model,
        prompt_ids,
        draft,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        mask_token_id=mask_token_id,
        eos_token_id=eos_token_id,
        sample=sample,
    )


def verified(
    model: Model,
    prompt_ids: Sequence[int],
    draft: Callable[[Tensor, Tensor, int], tuple[Tensor, int]],
    *,
    max_new_tokens: int,
    temperature: float,
    mask_token_id: int | None = None,
    eos_token_id: int | None = None,
    sample: Sample,
) -> Run:
    """Draft a block, verify it causally, keep what agrees and one token more.

    After each draft comes one causal pass with the plain weights: position i of the block gives the
    token at i + 1. As long as the draft agrees its tokens are kept, and the first that the causal
    pass draws otherwise, or the one after the whole block, is the next token. So what comes out is
    the autoregressive mode's, token by token; with ``sample`` keyed by position it is so at any
    temperature.

    What is kept may be up to a block longer than ``max_new_tokens``, which is looked at only
    between blocks.

    Args:
        model: With the plain weights where no row is adapted.
        prompt_ids: Token ids.
        draft: Given the known tokens, the certain one after them and the number of blocks before,
            returns a block of that token and drafted ones, and how many masks it started from.
        max_new_tokens: At least so many are wanted.
        temperature: 0 takes the likeliest token.
        mask_token_id: Of which the record counts those in a draft.
        eos_token_id: Ends the answer.
        sample: Draws a token in each row.
    """
    run = Run()
    x = torch.tensor(prompt_ids, dtype=torch.long)
    run.passes.append(Pass("prefill", 0, 0))
    token = _next_tokens(model(x, causal(len(x)))[-1:], len(x), temperature, sample)
    generated = token.tolist()
    canvas = 0
    while len(generated) < max_new_tokens and eos_token_id not in generated:
        start = len(x)
        block, num_masked = draft(x, token, canvas)
        run.passes.append(Pass("draft", start, num_masked))
        run.passes.append(Pass("verify", start, block.tolist().count(mask_token_id)))
        longer = torch.cat([x, block])
        logits = model(longer, causal(len(longer)))[start:]
        said = _next_tokens(logits, start + 1, temperature, sample)
        agrees = (said[:-1] == block[1:]).long().cumprod(0)
        accepted = int(agrees.sum()) + 1
        x = longer[: start + accepted]
        token = said[accepted - 1 : accepted]
        generated += said[:accepted].tolist()
        canvas += 1
    run.tokens = cut(generated, [] if eos_token_id is None else [eos_token_id])
    run.revealed = [-1] * len(run.tokens)
    return run
