"""What the reference loops share: their record, their draws, their choice of positions.

A loop asks its model for the logits of a whole sequence, ``model(ids, visible)``, where ``visible``
sets which position sees which. Scripted functions stand in for a model in tests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attention_kernels.noise import Purpose, gumbel_noise, random_words, uniform_tokens


class Model(Protocol):
    """A whole sequence at once.

    ``ids`` is [T], int64; ``visible`` [T, T], bool, true where a row sees a column; what comes back
    is [T, V], float32.
    """

    def __call__(self, ids: Tensor, visible: Tensor) -> Tensor: ...


class Pass(NamedTuple):
    """One forward pass of the published loop, as it runs with a KV cache.

    Attributes:
        kind: ``prefill``, ``denoise``, ``commit``, ``decode``, ``draft`` or ``verify``.
        start: Position of the first token that the pass is about.
        num_masked: Masks that its input held.
    """

    kind: str
    start: int
    num_masked: int


@dataclass
class Run:
    """One generation.

    Attributes:
        tokens: What the loop returned after the prompt.
        passes: Every forward pass, in order.
        revealed: Per position of ``tokens`` the step of its block, from 0, that wrote it last; -1
            where no denoising step did (a seed, a drafted token, a mask that was left).
        rewritten: How often a decided position was given another token.
    """

    tokens: list[int] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    revealed: list[int] = field(default_factory=list)
    rewritten: int = 0

    def count(self, *kinds: str) -> int:
        """Passes of these kinds."""
        return sum(one.kind in kinds for one in self.passes)


def begin(
    prompt_ids: Sequence[int], gen_length: int, block_length: int, mask_id: int
) -> tuple[Run, Tensor, Tensor, range]:
    """What a loop over blocks from position 0 begins with; the prompt's whole blocks are cached.

    Returns:
        Its record, the sequence in whole blocks with masks after the prompt, per position the step
        that wrote it (none yet), and the starts of the blocks that are generated.
    """
    run, first_block = Run(), len(prompt_ids) // block_length
    num_blocks = -(-(len(prompt_ids) + gen_length) // block_length)
    if first_block:
        run.passes.append(Pass("prefill", 0, 0))
    x = torch.full((num_blocks * block_length,), mask_id)
    x[: len(prompt_ids)] = torch.tensor(prompt_ids, dtype=torch.long)
    starts = range(first_block * block_length, len(x), block_length)
    return run, x, torch.full_like(x, -1), starts


class Draws(NamedTuple):
    """What each drawn row is keyed by: three int64 tensors, [rows].

    Attributes:
        canvas: 0 for the first block that is generated. For tokens that are drawn one after another
            (a seed, an autoregressive token, a verified one) always 0.
        step: Denoising step of the block, from 0; 0 for those tokens.
        position: In the block; for those tokens, in the sequence.
    """

    canvas: Tensor
    step: Tensor
    position: Tensor


# Tokens [rows] from logits [rows, V] that are already divided by the temperature and filtered
# (``-inf`` where a token is excluded). Called at temperatures above 0 only.
Sample = Callable[[Tensor, Draws], Tensor]


def multinomial(logits: Tensor, draws: Draws) -> Tensor:
    """Torch's generator decides, as in the publishers' loops."""
    return torch.multinomial(logits.double().softmax(-1), 1)[:, 0]


def keyed_sample(seed: int) -> Sample:
    """This package's keyed noise decides: the same request, block, step and position, the same
    draw.
    """

    def sample(logits: Tensor, draws: Draws) -> Tensor:
        rows, vocab_size = logits.shape
        words = random_words(torch.full((rows,), seed), *draws, vocab_size)
        return (logits + gumbel_noise(words)).argmax(-1)

    return sample


# Numbers between 0 and 1 of a block's step, by positions of the sequence.
Uniform = Callable[[int, int, Tensor], Tensor]


def torch_uniform(canvas: int, step: int, positions: Tensor) -> Tensor:
    """Torch's generator decides, as in the publishers' loops."""
    return torch.rand(len(positions))


def keyed_uniform(seed: int) -> Uniform:
    """This package's keyed numbers decide, as in :func:`keyed_sample`."""

    def uniform(canvas: int, step: int, positions: Tensor) -> Tensor:
        keys = (torch.tensor([number]) for number in (seed, canvas, step))
        length = int(positions.max()) + 1
        numbers = uniform_tokens(*keys, length, 2**23, Purpose.REVEAL)[0]
        return ((numbers.to(torch.float32) + 0.5) / 2**23)[positions]

    return uniform


def block_draws(canvas: int, step: int, positions: Iterable[int]) -> Draws:
    """The keys of rows of one block."""
    position = torch.tensor(list(positions))
    return Draws(torch.full_like(position, canvas), torch.full_like(position, step), position)


def token_draws(positions: Iterable[int]) -> Draws:
    """The keys of tokens that are drawn one after another."""
    return block_draws(0, 0, positions)


def filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """``logits`` with ``-inf`` outside of the top k and of the smallest set that exceeds ``top_p``.

    Ties with the k-th are kept; among ties at the edge of ``top_p`` the lower id is.
    """
    if top_k > 0:
        kth = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        accumulated = ordered.softmax(-1).cumsum(-1)
        behind = torch.zeros_like(order, dtype=torch.bool)
        behind[..., 1:] = accumulated[..., :-1] > top_p
        removed = torch.empty_like(behind).scatter(-1, order, behind)
        logits = logits.masked_fill(removed, float("-inf"))
    return logits


def drawn(logits: Tensor, temperature: float, sample: Sample, draws: Draws) -> Tensor:
    """Tokens [rows]: the most likely ones at temperature 0, else draws at the temperature."""
    return logits.argmax(-1) if temperature == 0 else sample(logits / temperature, draws)


def draw(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    sample: Sample,
    draws: Draws,
) -> tuple[Tensor, Tensor]:
    """Tokens [rows], and their probability under what they were drawn from, [rows].

    At temperature 0 the most likely token, and its probability under the plain softmax.
    """
    if temperature > 0:
        logits = filtered(logits / temperature, top_k, top_p)
        tokens = sample(logits, draws)
    else:
        tokens = logits.argmax(-1)
    return tokens, probability(logits, tokens)


def probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """[rows]: the softmax of ``logits`` at ``tokens``."""
    return logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]


def entropy_of(logits: Tensor, temperature: float) -> Tensor:
    """[rows], nats: of the softmax at the temperature, at 1 where that is 0, without any filter."""
    return torch.special.entr((logits / (temperature or 1.0)).softmax(-1)).sum(-1)


def num_affordable(entropy: Tensor, budget: float) -> int:
    """How many of the least entropies have at most a budget as their sum without the largest."""
    ordered = sorted(entropy.tolist())
    return max(n for n in range(1, len(ordered) + 1) if sum(ordered[: n - 1]) <= budget)


def most_confident(confidence: Tensor, candidates: Tensor, count: int) -> Tensor:
    """[rows], bool: the ``count`` candidates of highest confidence, all where there are fewer.

    Among equals the leftmost wins; the publishers' ``topk`` leaves that open.
    """
    order = confidence.masked_fill(~candidates, -torch.inf).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(candidates)
    chosen[order[:count]] = True
    return chosen & candidates


def not_below(p: Tensor, masked: Tensor, count: int, threshold: float | None) -> Tensor:
    """[rows], bool: the ``count`` most probable masks; with a threshold the most probable one, and
    every other that is not below it.
    """
    if threshold is None:
        return most_confident(p, masked, count)
    return most_confident(p, masked, 1) | (masked & (p >= threshold))


# Tokens and those to be revealed, [rows] each, from logits, masks, the schedule's number and keys.
Choose = Callable[[Tensor, Tensor, int, Draws], tuple[Tensor, Tensor]]


def by_probability(
    logits: Tensor,
    masked: Tensor,
    count: int,
    draws: Draws,
    *,
    temperature: float,
    sample: Sample,
    threshold: float | None,
) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits / temperature), and reveal by the probability at temperature 1, in
    float64 (:func:`not_below`).
    """
    tokens = drawn(logits, temperature, sample, draws)
    return tokens, not_below(probability(logits.double(), tokens), masked, count, threshold)


def denoise(
    run: Run,
    model: Model,
    mask_id: int,
    choose: Choose,
    ids: Tensor,
    visible: Tensor,
    rows: slice,
    revealed: Tensor,
    schedule: Iterable[int],
    canvas: int,
) -> None:
    """Reveal masks of a block in place, step after step, while there are both masks and steps.

    Args:
        run: Gets the passes.
        model: Sees all of ``ids``.
        mask_id: Of masks.
        choose: The rule of a step.
        ids: [T], changed in ``rows``.
        visible: [T, T].
        rows: The block.
        revealed: [rows], gets the step that wrote each position.
        schedule: A number for each step.
        canvas: Number of the block, in keys of draws.
    """
    block = ids[rows]
    for step, count in enumerate(schedule):
        masked = block == mask_id
        if not masked.any():
            break
        run.passes.append(Pass("denoise", rows.start, int(masked.sum())))
        logits = model(ids, visible)[rows]
        draws = block_draws(canvas, step, range(len(block)))
        tokens, reveal = choose(logits, masked, count, draws)
        block[reveal] = tokens[reveal]
        revealed[reveal] = step


def even_schedule(num_masked: int, steps: int) -> list[int]:
    """How many positions each step reveals: as even as can be, the larger numbers first."""
    base, remainder = divmod(num_masked, steps)
    return [base + (step < remainder) for step in range(steps)]


def causal(length: int) -> Tensor:
    """[length, length]: each position sees itself and the earlier ones."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def block_causal(length: int, block_length: int) -> Tensor:
    """[length, length]: each position sees its whole block and the earlier ones.

    Blocks are counted from position 0 of the sequence.
    """
    block = torch.arange(length) // block_length
    return block[:, None] >= block[None, :]


def causal_then_block(context: int, block_length: int) -> Tensor:
    """A causal context, and after it one block that sees all of it and of itself."""
    visible = causal(context + block_length)
    visible[context:] = True
    return visible


def suppress(model: Model, ids: Iterable[int]) -> Model:
    """The same model, but these ids can never be drawn.

    No published loop does it; every engine must, for the mask token at least: a drawn mask stays a
    mask, and the loops do not end.
    """
    banned = list(ids)

    def forward(tokens: Tensor, visible: Tensor, **kwargs: object) -> Tensor:
        logits = model(tokens, visible, **kwargs).clone()
        logits[:, banned] = float("-inf")
        return logits

    return forward


def cut(tokens: list[int], ends: Iterable[int]) -> list[int]:
    """``tokens`` up to and including the first that is in ``ends``."""
    ends = set(ends)
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens
