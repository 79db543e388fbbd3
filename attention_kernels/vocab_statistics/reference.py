"""The definition of correct: plain PyTorch, also what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_kernels.vocab_statistics.running import RowDraws, RunningStatistics

_NOTHING = float("-inf")


def update_statistics_reference(
    running: RunningStatistics,
    logits: Tensor,
    first_id: int,
    draws: RowDraws,
    softcap: float | None,
    weights: Tensor | None,
) -> Tensor:
    x = logits.float()
    if softcap is not None:
        x = torch.tanh(x / softcap) * softcap
    x = x / draws.temperature[:, None]
    _update_candidate(running, x, first_id, draws)

    tile_maximum, tile_argmax = x.max(dim=-1)
    # The first of equal ones, whatever max() returns.
    tile_argmax = x.argmax(dim=-1) + first_id
    running.argmax.copy_(torch.where(tile_maximum > running.maximum, tile_argmax, running.argmax))
    maximum = torch.maximum(running.maximum, tile_maximum)
    # As long as nothing is possible, anything finite will do.
    shift = torch.where(maximum == _NOTHING, 0.0, maximum)
    fall = torch.where(running.maximum == _NOTHING, 0.0, running.maximum - shift)
    rescale = fall.exp()

    distance = x - shift[:, None]
    exponentials = distance.exp()
    total = exponentials.sum(dim=-1)
    # 0 * -inf is not a number, where the limit is 0.
    weighted = torch.where(exponentials > 0, exponentials * distance, 0.0).sum(dim=-1)
    running.weighted.copy_(rescale * (running.weighted + running.total * fall) + weighted)
    running.total.copy_(rescale * running.total + total)
    running.maximum.copy_(maximum)
    if weights is not None:
        weights.copy_(exponentials)
    return rescale


def _update_candidate(
    running: RunningStatistics, x: Tensor, first_id: int, draws: RowDraws
) -> None:
    scores = draws.candidate_logits(x) + draws.noise(x.shape[1], first_id)
    candidate = scores.argmax(dim=-1, keepdim=True)
    best = scores.gather(-1, candidate)[:, 0]
    better = best > running.best
    running.candidate.copy_(torch.where(better, candidate[:, 0] + first_id, running.candidate))
    running.best.copy_(torch.where(better, best, running.best))
