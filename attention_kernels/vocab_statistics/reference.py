"""The definition of correct: plain PyTorch, also what runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attention_kernels.vocab_statistics.logits import MASS_SCALE, RowLogits, ordered_keys
from attention_kernels.vocab_statistics.running import FilteredDraw, RowDraws, RunningStatistics
from attention_kernels.vocab_statistics.search import Piece

_NOTHING = float("-inf")
_LOWEST = torch.finfo(torch.float32).min
# Ids of kept rows that are in float32 at once.
_TILE = 4096
# Rows that are in float32 at once, so that with this many ids they stay in a CPU's cache. A
# judgement: 32 to 256 were timed on a core that had other work, and differed by less than it did.
_ROWS = 64


def _row_slices(num_rows: int) -> Iterator[slice]:
    """Yield the rows in pieces whose intermediates stay in a CPU's cache."""
    for start in range(0, num_rows, _ROWS):
        yield slice(start, start + _ROWS)


def update_statistics(
    running: RunningStatistics,
    rows: RowLogits,
    draws: RowDraws,
    weights: Tensor | None,
    product: Tensor | None,
) -> None:
    for some in _row_slices(len(rows.projected)):
        _update_rows(
            running.rows(some),
            rows.rows(some),
            draws.rows(some),
            None if weights is None else weights[some],
            None if product is None else product[some],
        )


def _update_rows(
    running: RunningStatistics,
    rows: RowLogits,
    draws: RowDraws,
    weights: Tensor | None,
    product: Tensor | None,
) -> None:
    x = rows.scaled(draws.temperature)
    # The first of equal ones, whatever max() returns.
    tile_maximum, tile_argmax = x.amax(dim=-1), x.argmax(dim=-1)
    _update_candidate(running, x, tile_argmax, rows.first_id, draws)

    tile_argmax += rows.first_id
    running.argmax.copy_(torch.where(tile_maximum > running.maximum, tile_argmax, running.argmax))
    maximum = torch.maximum(running.maximum, tile_maximum)
    # As long as nothing is possible, anything finite will do.
    shift = torch.where(maximum == _NOTHING, 0.0, maximum)
    fall = torch.where(running.maximum == _NOTHING, 0.0, running.maximum - shift)
    rescale = fall.exp()

    distance = x.sub_(shift[:, None])
    exponentials = distance.exp()
    total = exponentials.sum(dim=-1)
    # 0 * -inf is not a number, where the limit is 0.
    weighted = distance.clamp_(min=_LOWEST).mul_(exponentials).sum(dim=-1)
    running.weighted.copy_(rescale * (running.weighted + running.total * fall) + weighted)
    running.total.copy_(rescale * running.total + total)
    running.maximum.copy_(maximum)
    if weights is not None:
        weights.copy_(exponentials)
    if product is not None:
        product.mul_(rescale[:, None])


def _update_candidate(
    running: RunningStatistics, x: Tensor, argmax: Tensor, first_id: int, draws: RowDraws
) -> None:
    if draws.is_greedy:
        scores, candidate = x, argmax[:, None]
    else:
        scores = x / draws.rate[:, None] + draws.noise(x.shape[1], first_id)
        candidate = scores.argmax(dim=-1, keepdim=True)
    best = scores.gather(-1, candidate)[:, 0]
    better = best > running.best
    running.candidate.copy_(torch.where(better, candidate[:, 0] + first_id, running.candidate))
    running.best.copy_(torch.where(better, best, running.best))
    running.drawn.copy_(torch.where(better, x.gather(-1, candidate)[:, 0], running.drawn))


def scaled_logits(rows: RowLogits, divisor: Tensor) -> Tensor:
    scaled = torch.empty(rows.projected.shape, device=divisor.device)
    for tile in rows.tiles(_TILE):
        first = tile.first_id - rows.first_id
        scaled[:, first : first + _TILE] = tile.scaled(divisor)
    return scaled


def largest_logit(rows: RowLogits, divisor: Tensor) -> Tensor:
    largest = torch.full_like(divisor, _NOTHING)
    for tile in rows.tiles(_TILE):
        largest = torch.maximum(largest, tile.scaled(divisor).amax(dim=-1))
    return largest


def largest_logits(
    rows: RowLogits,
    divisor: Tensor,
    num: int,
    scaled_logits: Callable[[RowLogits, Tensor], Tensor],
) -> Tensor:
    parts = []
    for some in _row_slices(len(divisor)):
        largest = torch.full((len(divisor[some]), num), _NOTHING, device=divisor.device)
        for tile in rows.rows(some).tiles(_TILE):
            largest = _larger(largest, scaled_logits(tile, divisor[some]))
        parts.append(largest)
    return torch.cat(parts)


def _larger(largest: Tensor, scaled: Tensor) -> Tensor:
    return torch.cat([largest, scaled], dim=1).topk(largest.shape[1]).values


def weigh(
    rows: RowLogits,
    divisor: Tensor,
    maximum: Tensor,
    pivots: Tensor,
    bounds: Tensor,
    by_mass: bool,
) -> Tensor:
    # Between two pivots, before the first and after the last.
    ranges = torch.zeros(len(pivots), pivots.shape[1] + 1, dtype=torch.int64, device=pivots.device)
    for tile in rows.tiles(_TILE):
        x = tile.scaled(divisor)
        keys = ordered_keys(x)
        weight = (keys < bounds[:, 1:]).long()
        if by_mass:
            share = _shares(x, maximum)
            weight *= (share * MASS_SCALE).long()
        if pivots.shape[1] == 1:
            # A search is much of a sweep's time.
            ranges[:, 1] += weight.mul_(keys >= pivots).sum(dim=1)
            continue
        ranges.scatter_add_(1, torch.searchsorted(pivots, keys, right=True), weight)
    return ranges.flip(-1).cumsum(-1).flip(-1)[:, 1:]


def narrow(piece: Piece, weights: Tensor, wanted: Tensor) -> None:
    bounds, pivots, settled = piece
    weights = weights + settled[:, None]
    # Weights fall as pivots rise: the leading ones are enough.
    num_enough = (weights >= wanted[:, None]).sum(dim=1, keepdim=True)
    edges = torch.cat([bounds[:, :1], pivots, bounds[:, 1:]], dim=1)
    settled.copy_(torch.cat([weights, settled[:, None]], dim=1).gather(1, num_enough)[:, 0])
    bounds.copy_(edges.gather(1, torch.cat([num_enough, num_enough + 1], dim=1)))
    low, high = bounds[:, :1], bounds[:, 1:]
    num_pivots = pivots.shape[1]
    part = torch.arange(1, num_pivots + 1, device=wanted.device)
    pivots.copy_(low + (high - low) * part // (num_pivots + 1))


def draw(
    rows: RowLogits, divisor: Tensor, maximum: Tensor, keys: Tensor, draws: RowDraws
) -> FilteredDraw:
    parts = [
        _draw_rows(rows.rows(some), divisor[some], maximum[some], keys[some], draws.rows(some))
        for some in _row_slices(len(keys))
    ]
    return FilteredDraw(*map(torch.cat, zip(*parts, strict=True)))


def _draw_rows(
    rows: RowLogits, divisor: Tensor, maximum: Tensor, keys: Tensor, draws: RowDraws
) -> FilteredDraw:
    best = torch.full_like(divisor, _NOTHING)
    candidate = torch.zeros_like(keys)
    drawn = torch.full_like(divisor, _NOTHING)
    mass = torch.zeros_like(divisor)
    for tile in rows.tiles(_TILE):
        # An id that no threshold keeps is as one that is impossible.
        x = tile.scaled(divisor)
        is_kept = ordered_keys(x) >= keys[:, None]
        x.masked_fill_(~is_kept, _NOTHING)
        mass += _shares(x, maximum).sum(dim=-1)
        scores = _noised(x, is_kept, tile.first_id, draws)
        index = scores.argmax(dim=-1, keepdim=True)
        score = scores.gather(-1, index)[:, 0]
        better = score > best
        candidate = torch.where(better, index[:, 0] + tile.first_id, candidate)
        best = torch.where(better, score, best)
        drawn = torch.where(better, x.gather(-1, index)[:, 0], drawn)
    return FilteredDraw(best, candidate, drawn, mass)


def _noised(x: Tensor, is_kept: Tensor, first_id: int, draws: RowDraws) -> Tensor:
    """Add noise to the ids that are kept."""
    if draws.is_greedy:
        return x
    row, column = is_kept.nonzero(as_tuple=True)
    # What makes noise of a row makes that of four ids at a time.
    if 4 * len(row) > is_kept.numel():
        return x + draws.noise(x.shape[1], first_id)
    scores = x.clone()
    scores[row, column] += draws.rows(row).noise_of(column + first_id)
    return scores


def _shares(x: Tensor, maximum: Tensor) -> Tensor:
    """[num_rows, num_ids]: exp(x - maximum); 0 where nothing is possible."""
    shift = torch.where(maximum == _NOTHING, 0.0, maximum)
    return x.sub(shift[:, None]).exp_()
