"""Models of a few lines, and the published loops at their size, for passes worked out by hand."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tests.support.families import (
    dream_reasoner,
    llada2,
    nemotron,
    run,
    stable_diffcoder,
)
from tests.support.families.model import scripted

VOCAB, MASK, END = 100, 4, 1
DELETE, SPLIT = 98, 99


def row(token: int, p: float, second: int | None = None) -> Tensor:
    """[VOCAB]: logits under which ``token`` has probability ``p``, and ``second`` all the rest.

    Without a second all other tokens share the rest; with ``p=0.5`` and a second both are exactly
    as likely, and the softmax is exact.
    """
    rest = (1 - p) / (VOCAB - 1)
    logits = torch.full((VOCAB,), math.log(rest) if second is None else float("-inf"))
    if second is not None:
        logits[second] = math.log(1 - p)
    logits[token] = math.log(p)
    return logits


def constant(rows: Sequence[Tensor]) -> run.Model:
    """A model that predicts the same at each position whatever stands there."""
    return scripted(lambda ids: torch.stack(list(rows[: len(ids)])))


def decreasing(length: int, *, first: float = 0.9, by: float = 0.05, token: int = 10) -> run.Model:
    """Position i predicts ``token + i``, each with less certainty than the one before."""
    return constant([row(token + i, first - by * i) for i in range(length)])


llada2_0_loop = partial(
    llada2.generate_2_0,
    prompt_ids=(),
    mask_id=MASK,
    eos_id=END,
    gen_length=8,
    block_length=8,
    steps=8,
)
llada2_1_loop = partial(
    llada2.generate_2_1, prompt_ids=(), mask_id=MASK, eos_id=END, gen_length=4, block_length=4
)
llada2_2_loop = partial(
    llada2.generate_2_2,
    prompt_ids=(),
    mask_id=MASK,
    eos_ids=(END,),
    delete_token_id=DELETE,
    split_token_id=SPLIT,
    gen_length=4,
    block_length=4,
    steps=4,
)
nemotron_loop = partial(nemotron.generate, max_new_tokens=8, block_length=8, mask_id=MASK)
linear_spec_loop = partial(
    nemotron.linear_spec_generate, max_new_tokens=9, block_length=4, mask_token_id=MASK
)
stable_diffcoder_loop = partial(
    stable_diffcoder.generate_block,
    prompt_ids=(),
    mask_id=MASK,
    steps=8,
    gen_length=8,
    block_length=4,
)
dream_reasoner_loop = partial(
    dream_reasoner.generate, prompt_ids=(), mask_id=MASK, gen_length=8, block_length=8
)
