"""What a denoising step needs to know of each canvas row's logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_diffusion.sampling.noise import gumbel_noise, random_words


class RowStatistics(NamedTuple):
    """One entry per canvas row.

    Attributes:
        argmax: [num_rows], int64, the likeliest token.
        candidate: [num_rows], int64, the drawn token.
        entropy: [num_rows], float32, nats, of the distribution at the schedule's temperature.
        confidence: [num_rows], float32, probability of ``argmax`` in that distribution.
    """

    argmax: Tensor
    candidate: Tensor
    entropy: Tensor
    confidence: Tensor


class CandidateFilters(NamedTuple):
    """Restrictions of the candidate's distribution, one entry per row.

    Attributes:
        top_k: [num_rows], integer; the vocabulary size is off.
        top_p: [num_rows], float32; 1 is off.
        min_p: [num_rows], float32; 0 is off.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def row_statistics(
    scaled_logits: Tensor,
    request_temperature: Tensor,
    seed: Tensor,
    canvas_idx: Tensor,
    step: Tensor,
    position: Tensor,
    filters: CandidateFilters | None,
) -> RowStatistics:
    """Argmax, Gumbel-max candidate and entropy of each row.

    Args:
        scaled_logits: [num_rows, vocab_size], float32, already divided by the schedule's
            temperature.
        request_temperature: [num_rows], float32. Scales the candidate's distribution only;
            0 draws the argmax.
        seed: [num_rows], int64.
        canvas_idx: [num_rows], integer.
        step: [num_rows], integer.
        position: [num_rows], integer.
        filters: Top-k, top-p and min-p of each row; ``None`` when no row has any.
    """
    log_probs = torch.log_softmax(scaled_logits, dim=-1)
    probs = log_probs.exp()
    # 0 * -inf is not a number, where the limit is 0: a masked token adds no entropy.
    entropy = -torch.where(probs > 0, probs * log_probs, 0.0).sum(-1)
    confidence, argmax = probs.max(dim=-1)
    # Of equal logits the argmax of the logits themselves decides, before any rounding of exp.
    argmax = scaled_logits.argmax(dim=-1)

    greedy = request_temperature == 0
    candidate_logits = scaled_logits / torch.where(greedy, 1.0, request_temperature)[:, None]
    if filters is not None:
        candidate_logits = apply_filters(candidate_logits, filters)
    noise = gumbel_noise(random_words(seed, canvas_idx, step, position, scaled_logits.shape[-1]))
    candidate = torch.where(greedy, argmax, (candidate_logits + noise).argmax(dim=-1))
    return RowStatistics(argmax, candidate, entropy, confidence)


def apply_filters(logits: Tensor, filters: CandidateFilters) -> Tensor:
    """Mask what top-k, top-p and min-p exclude, in vLLM's order and with its definitions.

    Args:
        logits: [num_rows, vocab_size], float32, at the candidate's temperature.
        filters: One entry per row.

    Returns:
        [num_rows, vocab_size], float32, excluded tokens at minus infinity.
    """
    vocab_size = logits.shape[-1]
    # min-p: at least this fraction of the likeliest token's probability.
    floor = logits.max(dim=-1, keepdim=True).values + filters.min_p.log()[:, None]
    logits = logits.masked_fill(logits < floor, float("-inf"))
    ascending, order = logits.sort(dim=-1)
    # top-k: at least the k-th largest logit, so that ties with it stay.
    kth = ascending.gather(-1, (vocab_size - filters.top_k.long().clamp(1, vocab_size))[:, None])
    ascending = ascending.masked_fill(ascending < kth, float("-inf"))
    # top-p: the smallest set of likeliest tokens whose probability reaches p.
    below = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - filters.top_p[:, None]
    below[:, -1] = False
    ascending = ascending.masked_fill(below, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ascending)
