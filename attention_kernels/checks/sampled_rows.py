"""Checks of the kernels over rows of logits, which may be four times as far from float64 as the
reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.checks.device import Checked
from attention_kernels.testing import make_adjustments, make_draws
from attention_kernels.vocab_statistics import (
    LEAST_KEY,
    Impl,
    LogitAdjustments,
    RowDraws,
    RowLogits,
    RunningStatistics,
    add_product,
    draw,
    largest_key,
    largest_logit,
    ordered_keys,
    scaled_logits,
    update_statistics,
    weigh,
)

EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class RowsShape:
    """Rows of logits that a sampler looks at.

    Attributes:
        num_rows: Rows of the pass.
        num_ids: Ids of the vocabulary.
        tile: Ids that are projected at once.
        softcap: Cap of the logits; ``None`` without one.
        dtype: Name of the logits' dtype in torch.
        adjusted: True with biases, penalties, masks and pins.
        hidden: Width of soft embeddings.
    """

    num_rows: int
    num_ids: int
    tile: int
    softcap: float | None = 30.0
    dtype: str = "bfloat16"
    adjusted: bool = False
    hidden: int = 16

    def logits(self, device: torch.device) -> RowLogits:
        """Random logits before the cap, with their adjustments."""
        generator = torch.Generator().manual_seed(3)
        projected = torch.randn(self.num_rows, self.num_ids, generator=generator) * 12
        adjustments = None
        if self.adjusted:
            made = make_adjustments(self.num_rows, self.num_ids, generator)
            adjustments = LogitAdjustments(*(value.to(device) for value in made))
        dtype = getattr(torch, self.dtype)
        return RowLogits(projected.to(device, dtype), 0, self.softcap, adjustments)

    def draws(self, device: torch.device) -> RowDraws:
        """Random temperatures and keys."""
        made = make_draws(self.num_rows, torch.Generator().manual_seed(4))
        return RowDraws(*(value.to(device) for value in made))


def check_statistics(shape: RowsShape, impl: Impl, device: torch.device) -> Checked:
    """Compare a pass over the vocabulary in tiles with float64: statistics, soft embeddings and
    draws.

    Args:
        shape: The rows.
        impl: Implementation that is checked.
        device: Where it runs.

    Raises:
        AssertionError: If one of them is too far from float64.
    """
    rows, draws = shape.logits(device), shape.draws(device)
    # Drawn where it is needed: it may be some 100 MB.
    generator = torch.Generator(device).manual_seed(5)
    size = (shape.num_ids, shape.hidden)
    embedding = torch.randn(*size, generator=generator, device=device).to(rows.projected)
    ours, soft = _streamed(rows, draws, embedding, shape.tile, impl)
    plain, plain_soft = _streamed(rows, draws, embedding, shape.tile, "reference")
    exact = _exact_logits(rows, draws)
    probs = exact.softmax(-1)
    entropy = -torch.where(probs > 0, probs * probs.clamp(min=1e-300).log(), 0.0).sum(-1)
    _hold("entropy", ours.entropy(), plain.entropy(), entropy)
    _hold("confidence", ours.confidence(), plain.confidence(), probs.amax(-1))
    _hold("soft embedding", soft, plain_soft, probs @ embedding.double())
    # Equal up to what rounding decides: a logit at most a bit below the largest.
    bit = 1e-5 * exact.where(exact.isfinite(), 0.0).abs().amax(-1).clamp(min=1.0)
    largest = exact.gather(1, ours.argmax[:, None])[:, 0]
    assert (largest >= exact.amax(-1) - bit).all(), "an argmax is not the largest"
    _assert_same_draws(ours.best, plain.best, ours.candidate, plain.candidate)
    return Checked(
        (ours.entropy().double() - entropy).abs().max().item(),
        lambda: _streamed(rows, draws, embedding, shape.tile, impl),
    )


def _streamed(
    rows: RowLogits, draws: RowDraws, embedding: Tensor, size: int, impl: Impl
) -> tuple[RunningStatistics, Tensor]:
    """Take the statistics of rows a tile at a time.

    Args:
        rows: The rows.
        draws: Their temperatures and keys.
        embedding: [num_ids, hidden_size].
        size: Ids of a tile.
        impl: Implementation.

    Returns:
        The statistics, and [num_rows, hidden_size], the soft embeddings.
    """
    device, num_rows = embedding.device, len(draws.seed)
    running = RunningStatistics.empty(num_rows, device)
    soft = torch.zeros(num_rows, embedding.shape[1], device=device)
    for tile in rows.tiles(size):
        weights = torch.empty_like(tile.projected)
        ids = slice(tile.first_id, tile.first_id + weights.shape[1])
        update_statistics(
            running,
            tile,
            draws,
            weights=weights,
            product=soft,
            impl=impl,
        )
        add_product(soft, weights, embedding[ids], impl=impl)
    return running, soft / running.total[:, None]


def _exact_logits(rows: RowLogits, draws: RowDraws) -> Tensor:
    """[num_rows, num_ids], float64: capped and adjusted logits over the schedule's temperature."""
    exact = rows.projected.double()
    if rows.softcap is not None:
        exact = rows.softcap * torch.tanh(exact / rows.softcap)
    if rows.adjustments is not None:
        ids = torch.arange(exact.shape[1], device=exact.device)
        exact = rows.adjustments.apply(exact, ids).double()
    return exact / draws.temperature.double()[:, None]


def _hold(name: str, got: Tensor, same: Tensor, truth: Tensor) -> None:
    """Hold a statistic to four times the error of the reference."""
    assert got.isfinite().all(), f"{name}: non-finite values"
    error, theirs = ((each.double() - truth).abs().max().item() for each in (got, same))
    # A capped logit is a difference of numbers near the cap: a temperature magnifies their last
    # bit. Sums of sums round more often than one sum.
    budget = 4 * (theirs + EPS * (max(1.0, truth.abs().max().item()) + 30.0))
    assert error <= budget, f"{name}: error {error:.2e} exceeds {budget:.2e}"


def _assert_same_draws(best: Tensor, expected: Tensor, ids: Tensor, expected_ids: Tensor) -> None:
    torch.testing.assert_close(best, expected, rtol=1e-5, atol=1e-4)
    same = (ids == expected_ids).float().mean().item()
    assert same > 0.98, f"only {same:.1%} of the draws are the reference's"


def check_kept_rows(shape: RowsShape, impl: Impl, device: torch.device) -> Checked:
    """Compare what filters ask of rows with the reference.

    Counts agree but for logits on a pivot, masses to a rounding, and draws to a tie.

    Args:
        shape: The rows.
        impl: Implementation that is checked.
        device: Where it runs.

    Raises:
        AssertionError: If something differs by more.
    """
    rows, draws = shape.logits(device), shape.draws(device)
    divisor = draws.temperature
    maximum = largest_logit(rows, divisor, impl="reference")
    ours = largest_logit(rows, divisor, impl=impl)
    torch.testing.assert_close(ours, maximum, rtol=1e-6, atol=1e-5)
    scaled = scaled_logits(rows, divisor, impl=impl)
    expected = scaled_logits(rows, divisor, impl="reference")
    torch.testing.assert_close(scaled, expected, rtol=1e-5, atol=1e-4)
    # Between what any two kernels could round apart.
    steps = torch.linspace(-20.0, -1.0, 16, device=device) + 0.0173
    pivots = ordered_keys((maximum[:, None] + steps).contiguous()).long()
    bounds = torch.tensor([[LEAST_KEY, torch.iinfo(torch.int32).max]], device=device)
    bounds = bounds.repeat(len(maximum), 1)

    def sweep(by_mass: bool, impl: Impl) -> Tensor:
        return weigh(rows, divisor, maximum, pivots, bounds, by_mass=by_mass, impl=impl).double()

    for by_mass in (False, True):
        plain = sweep(by_mass, "reference")
        off = ((sweep(by_mass, impl) - plain).abs() / plain.clamp(min=1.0)).max().item()
        assert off <= 1e-3, f"weights by_mass={by_mass}: off by {off:.1e}"
    wanted = torch.full_like(maximum, 5, dtype=torch.int64)
    # Below its own maximum: another kernel's may differ in a bit, and leave an id out.
    fifth_largest = _as_float(_largest_key(rows, divisor, ours, wanted, impl))
    torch.testing.assert_close(fifth_largest, expected.topk(5).values[:, 4], rtol=1e-5, atol=1e-4)
    keys = torch.full_like(wanted, LEAST_KEY)
    drawn, plain_drawn = (
        draw(rows, divisor, maximum, keys, draws, impl=which) for which in (impl, "reference")
    )
    _assert_same_draws(drawn.best, plain_drawn.best, drawn.candidate, plain_drawn.candidate)
    difference = (drawn.mass - plain_drawn.mass).abs() / plain_drawn.mass.clamp(min=1.0)
    assert (error := difference.max().item()) <= 1e-4, f"mass: off by {error:.1e}"
    return Checked(error, lambda: sweep(True, impl))


def _largest_key(
    rows: RowLogits, divisor: Tensor, maximum: Tensor, wanted: Tensor, impl: Impl
) -> Tensor:
    """[num_rows], int64: the largest key that ``wanted`` ids reach."""

    def count(pivots: Tensor, bounds: Tensor) -> Tensor:
        return weigh(rows, divisor, maximum, pivots, bounds, by_mass=False, impl=impl)

    active = torch.ones_like(wanted, dtype=torch.bool)
    return largest_key(count, wanted, maximum, active, impl=impl)


def _as_float(keys: Tensor) -> Tensor:
    """Return the float32 values whose :func:`ordered_keys` these are."""
    return torch.where(keys < 0, keys ^ (2**31 - 1), keys).to(torch.int32).view(torch.float32)
