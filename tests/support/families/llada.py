"""LLaDA: a Llama that attends in both directions over prompt and answer, revealed block by block.

Source: ``generate.py`` of ML-GSAI/LLaDA at b7e6c35, ``generate``; ``threshold``: ``generate`` of
NVlabs/Fast-dLLM's ``llada/generate.py`` at 24cc59e, without its caches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.families.run import (
    Draws,
    Model,
    Pass,
    Run,
    Sample,
    Uniform,
    block_draws,
    drawn,
    even_schedule,
    multinomial,
    not_below,
    probability,
    torch_uniform,
)


@torch.no_grad()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    steps: int = 128,
    gen_length: int = 128,
    block_length: int = 128,
    temperature: float = 0.0,
    mask_id: int = 126336,
    remasking: str = "low_confidence",
    threshold: float | None = None,
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
    eos_id: int = 126081,
    eot_id: int = 126348,
    end_think_token_ids: Sequence[int] = (),
    end_think_logit_boost: float = 0.0,
    end_think_boost_power: float = 2.0,
    end_think_context_start: int = 0,
    end_think_total_gen_length: int = 0,
    schedule: Callable[[int, int], list[int]] = even_schedule,
    sample: Sample = multinomial,
    uniform: Uniform = torch_uniform,
) -> Run:
    """Blocks after the prompt, one after another, with masks in all later ones, which every pass
    sees.

    ``steps`` is divided by the number of blocks. A step reveals as many of the block's masks as an
    even schedule sets, those whose drawn token is most probable at temperature 1; with a
    ``threshold`` the most probable one, and every other that is not below it. No end token ends it.

    Differs from the publisher's: candidates are drawn from softmax(logits / temperature) directly,
    which is what its Gumbel noise in float64 amounts to; probabilities are float64; a mask in the
    prompt stays; the leftmost of equally probable positions comes first; ``cfg_scale`` is left out.
    That ``confidence_eos_eot_inf`` holds for ``eos_id`` at temperature 0 alone is the publisher's:
    there noised and plain logits are one tensor.

    With BD3LM's ``schedule`` it is ``MDLMSampler.sample`` of ZHZisZZ/dllm at ca17675,
    ``dllm/core/samplers/mdlm.py``.

    Where ``gen_length`` is not a multiple of ``block_length``, which the publisher's refuses, the
    last block is the shorter one.

    Raises:
        ValueError: If ``steps`` is not a multiple of the number of blocks.
    """
    num_blocks = -(-gen_length // block_length)
    if steps % num_blocks:
        raise ValueError(f"{steps=} must be a multiple of {num_blocks=}")
    run, start = Run(), len(prompt_ids)
    x = torch.cat([torch.tensor(prompt_ids, dtype=torch.long), torch.full((gen_length,), mask_id)])
    revealed = torch.full_like(x, -1)
    everything = torch.ones(len(x), len(x), dtype=torch.bool)
    for block in range(num_blocks):
        first = start + block * block_length
        last = min(first + block_length, len(x))
        rows = slice(first, last)
        for step, count in enumerate(schedule(last - first, steps // num_blocks)):
            masked = x[rows] == mask_id
            if not masked.any():
                break
            run.passes.append(Pass("denoise", first, int(masked.sum())))
            logits = model(x, everything)[rows].clone()
            if end_think_logit_boost and not contains(
                x[end_think_context_start:], end_think_token_ids
            ):
                at = int(masked.int().argmax())
                known = x[end_think_context_start : first + at].tolist()
                token = next_of(known, end_think_token_ids)
                progress = min((len(known) + 1) / end_think_total_gen_length, 1.0)
                logits[at, token] += end_think_logit_boost * progress**end_think_boost_power
            if logits_eos_inf:
                logits[:, eos_id] = -torch.inf
            draws = block_draws(block, step, range(first, last))
            tokens = drawn(logits, temperature, sample, draws)
            if confidence_eos_eot_inf:
                logits[:, [eot_id] if temperature else [eos_id, eot_id]] = -torch.inf
            p = probability(logits.double(), tokens)
            if remasking == "random":
                p = uniform(block, step, torch.arange(first, last)).double()
            reveal = not_below(p, masked, count, threshold)
            x[rows] = torch.where(reveal, tokens, x[rows])
            revealed[rows][reveal] = step
    run.tokens, run.revealed = x[start:].tolist(), revealed[start:].tolist()
    return run


def contains(tokens: Tensor, sequence: Sequence[int]) -> bool:
    """Whether a sequence stands anywhere in a text."""
    text = tokens.tolist()
    return any(text[i : i + len(sequence)] == list(sequence) for i in range(len(text)))


def next_of(known: Sequence[int], sequence: Sequence[int]) -> int:
    """The token with which the longest beginning of a sequence that a text ends with goes on."""
    for length in range(min(len(sequence) - 1, len(known)), 0, -1):
        if list(known[-length:]) == list(sequence[:length]):
            return sequence[length]
    return sequence[0]


def var_generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    **settings: Any,
) -> Run:
    """iLLaDA's: each block as an answer of its own, with no masks after it.

    Source: ``var_generate`` of the publisher's ``generate.py``, as found in a public copy. Its
    ``steps`` are those of a block. Stop strings are left out.
    """
    run, known = Run(), list(prompt_ids)
    uniform, sample = settings.pop("uniform"), settings.pop("sample")
    for block in range(-(-gen_length // block_length)):

        def of_block(canvas: int, step: int, positions: Tensor, block: int = block) -> Tensor:
            return uniform(block, step, positions)

        def sample_of_block(logits: Tensor, draws: Draws, block: int = block) -> Tensor:
            return sample(logits, draws._replace(canvas=torch.full_like(draws.canvas, block)))

        part = generate(
            model,
            known,
            steps=steps,
            gen_length=min(block_length, gen_length - block * block_length),
            block_length=block_length,
            uniform=of_block,
            sample=sample_of_block,
            end_think_context_start=len(prompt_ids),
            end_think_total_gen_length=gen_length,
            **settings,
        )
        known += part.tokens
        run.tokens += part.tokens
        run.passes += part.passes
        run.revealed += part.revealed
    return run
