"""Uno: causal drafts from random tokens with a LoRA, verified with the plain weights.

Source: ``nano_vllm_uno/engine/two_pass_decoding.py`` of ifm-ai/uno at 9018a5d, the linear sampler.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_kernels.noise import Purpose, uniform_tokens
from tests.support.families.nemotron import Model, verified
from tests.support.families.run import Run, Sample, causal, drawn, token_draws


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    block_length: int,
    temperature: float = 0.0,
    mask_token_id: int,
    sample: Sample,
    seed: int,
) -> Run:
    """Draft ``block_length - 1`` tokens after the certain one, and verify them.

    The draft's rows are the certain token, with the plain weights, and random tokens from 1 to the
    mask's id, with the LoRA; each gives the token after it.

    Differs from the publisher's: drafts are drawn with the noise of the tokens that verify them,
    where it keeps a draft with probability ``p / q``; random tokens are keyed by ``seed``, the
    number of the block and the position.
    """

    def draft(x: Tensor, token: Tensor, canvas: int) -> tuple[Tensor, int]:
        keys = (torch.tensor([number]) for number in (seed, canvas, 0))
        noise = uniform_tokens(*keys, block_length, mask_token_id - 1, Purpose.INITIAL)[0]
        start, block = len(x), torch.cat([token, 1 + noise[1:]])
        adapted = torch.arange(start + block_length) > start
        logits = model(torch.cat([x, block]), causal(len(adapted)), adapted=adapted)[start:-1]
        draws = token_draws(range(start + 1, start + block_length))
        return torch.cat([token, drawn(logits, temperature, sample, draws)]), 0

    return verified(
        model,
        prompt_ids,
        draft,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        sample=sample,
    )
