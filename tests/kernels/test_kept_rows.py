"""Tests of kept rows: adjusted logits, weights above pivots, thresholds and filtered draws."""

import functools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels import vocab_statistics
from attention_kernels.noise import random_words_of
from attention_kernels.testing import make_adjustments, make_draws
from attention_kernels.vocab_statistics import (
    LAST_RESORT,
    LEAST_KEY,
    MASS_SCALE,
    LogitAdjustments,
    RowLogits,
    draw,
    largest_key,
    largest_logit,
    ordered_keys,
    scaled_logits,
    weigh,
)
from attention_kernels.vocab_statistics import running as running_statistics

IMPLEMENTATIONS = ["reference", "triton"]


def make_rows(num_rows, vocab, generator, dtype=torch.float32, adjusted=True):
    projected = (torch.randn(num_rows, vocab, generator=generator) * 6).to(dtype)
    adjustments = make_adjustments(num_rows, vocab, generator) if adjusted else None
    divisor = torch.rand(num_rows, generator=generator) + 0.3
    return RowLogits(projected, 0, 30.0, adjustments), divisor


def adjusted_one_by_one(logits: torch.Tensor, a: LogitAdjustments) -> torch.Tensor:
    """Return the definition of the adjustment, one id at a time in Python."""
    out = logits.double().clone()
    for row in range(out.shape[0]):
        listed, penalty, mask = (int(i[row]) for i in (a.list_idx, a.penalty_idx, a.mask_idx))
        offsets = dict(
            zip(a.listed_ids[listed].tolist(), a.listed_offsets[listed].tolist(), strict=True)
        )
        for token in range(out.shape[1]):
            x = out[row, token].item()
            word, bit = token // 32, token % 32
            if listed >= 0:
                x += offsets.get(token, a.other_offsets[listed].item())
            if penalty >= 0:
                count = int(a.output_counts[penalty, token])
                in_prompt = (int(a.prompt_mask[penalty, word]) >> bit) & 1
                if count or in_prompt:
                    rate = a.repetition[penalty].item()
                    x = x / rate if x > 0 else x * rate
                x -= count * a.frequency[penalty].item()
                x -= a.presence[penalty].item() if count else 0.0
            if mask >= 0:
                allowed = (int(a.masks[mask, word]) >> bit) & 1
                x = max(x, LAST_RESORT) if allowed else float("-inf")
            if a.pin[row] >= 0:
                x = 0.0 if token == int(a.pin[row]) else float("-inf")
            out[row, token] = x
    return out


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocab=st.integers(5, 70),
    softcap=st.sampled_from([None, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_adjusted_logits(impl, rows, vocab, softcap, dtype, seed):
    """Offsets, penalties, masks and pins are applied in order, as one id at a time."""
    generator = torch.Generator().manual_seed(seed)
    logits, divisor = make_rows(rows, vocab, generator, dtype)
    logits = logits._replace(softcap=softcap)
    plain = logits.projected.double()
    if softcap is not None:
        plain = torch.tanh(plain / softcap) * softcap
    exact = adjusted_one_by_one(plain, logits.adjustments) / divisor.double()[:, None]
    ours = scaled_logits(logits, divisor, impl=impl)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        largest_logit(logits, divisor, impl=impl).double(), exact.amax(-1), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=10, deadline=None)
@given(vocab=st.integers(8, 3000), first=st.integers(1, 500), seed=st.integers(0, 2**31))
def test_part_of_the_vocabulary(impl, vocab, first, seed):
    """A rank's ids are adjusted by the tables of the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits, divisor = make_rows(3, vocab, generator)
    first = min(4 * first, (vocab - 1) // 4 * 4)
    part = logits._replace(projected=logits.projected[:, first:], first_id=first)
    torch.testing.assert_close(
        scaled_logits(part, divisor, impl=impl),
        scaled_logits(logits, divisor, impl=impl)[:, first:],
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("by_mass", [False, True], ids=["count", "mass"])
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocab=st.integers(5, 2000),
    adjusted=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_weights_above_pivots(impl, by_mass, rows, vocab, adjusted, seed):
    """Only weights between the bounds count, and a mass is a relative probability."""
    generator = torch.Generator().manual_seed(seed)
    logits, divisor = make_rows(rows, vocab, generator, adjusted=adjusted)
    x = scaled_logits(logits, divisor, impl=impl)
    maximum, keys = x.amax(-1), ordered_keys(x)
    # Pivots at logits of the row, where a comparison that is off by one would show.
    chosen = keys.gather(1, torch.randint(0, vocab, (rows, 18), generator=generator)).sort(1)[0]
    bounds = torch.stack([chosen[:, 0], chosen[:, -1]], dim=1)
    pivots = chosen[:, 1:17].contiguous()
    ours = weigh(logits, divisor, maximum, pivots, bounds, by_mass=by_mass, impl=impl)
    between = (keys[:, None, :] >= pivots[:, :, None]) & (keys < bounds[:, 1:])[:, None, :]
    weight = (x - maximum[:, None]).exp().double() * MASS_SCALE if by_mass else 1.0
    expected = torch.where(between, torch.as_tensor(weight).expand(rows, vocab)[:, None, :], 0.0)
    expected = expected.sum(-1, dtype=torch.float64)
    open_rows = bounds[:, 1] - bounds[:, 0] > 1
    if not by_mass:
        assert torch.equal(ours[open_rows].double(), expected[open_rows])
    else:
        # Whole units, and another exponential function.
        torch.testing.assert_close(
            ours[open_rows].double(), expected[open_rows], rtol=1e-5, atol=2.0 * vocab
        )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=5, deadline=None)
@given(
    vocab=st.integers(1, 1500),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 200.0]),
    seed=st.integers(0, 2**31),
)
def test_thresholds_are_exact(impl, vocab, scale, seed):
    """The threshold is the n-th largest logit with ties and impossible ids too."""
    generator = torch.Generator().manual_seed(seed)
    projected = torch.randn(4, vocab, generator=generator) * scale
    projected[0] = projected[0].round()
    projected[1, torch.rand(vocab, generator=generator) < 0.7] = float("-inf")
    logits, divisor = RowLogits(projected, 0), torch.ones(4)
    x = scaled_logits(logits, divisor, impl=impl)
    maximum = largest_logit(logits, divisor, impl=impl)
    wanted = torch.randint(1, vocab + 2, (4,), generator=generator)
    sweep = functools.partial(weigh, logits, divisor, maximum, by_mass=False, impl=impl)
    active = torch.tensor([True, True, True, False])
    keys = largest_key(sweep, wanted, maximum, active, impl=impl)
    ordered = ordered_keys(x).sort(dim=1, descending=True)[0]
    expected = ordered.gather(1, (wanted - 1).clamp(max=vocab - 1)[:, None])[:, 0]
    found = active & (wanted <= vocab)
    assert torch.equal(keys[found], expected[found])
    assert (keys[~found] == LEAST_KEY).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocab=st.integers(8, 10_000),
    kept=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_draws_above_a_threshold(impl, rows, vocab, kept, seed):
    """A filtered draw is the Gumbel-max of kept ids with the unfiltered noise, and has its mass."""
    generator = torch.Generator().manual_seed(seed)
    logits, divisor = make_rows(rows, vocab, generator)
    draws = make_draws(rows, generator)
    x = scaled_logits(logits, divisor, impl=impl)
    keys = ordered_keys(x.topk(min(kept, vocab), dim=1).values[:, -1])
    maximum = x.amax(-1)
    best, candidate, drawn, mass = draw(logits, divisor, maximum, keys, draws, impl=impl)
    is_kept = ordered_keys(x) >= keys[:, None]
    scores = torch.where(is_kept, x + draws.noise(vocab, 0), float("-inf"))
    assert is_kept.gather(1, candidate[:, None]).all()
    torch.testing.assert_close(best, scores.amax(-1), rtol=1e-5, atol=1e-5)
    assert (scores.gather(1, candidate[:, None])[:, 0] >= scores.amax(-1) - 1e-4).all()
    assert torch.equal(drawn, x.gather(1, candidate[:, None])[:, 0])
    shares = torch.where(is_kept, (x.double() - maximum.double()[:, None]).exp(), 0.0)
    torch.testing.assert_close(mass.double(), shares.sum(-1), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_nothing_possible_draws_an_id(impl):
    """A row without a possible id draws some id with mass 0."""
    logits = RowLogits(torch.full((1, 9), float("-inf")), 4)
    draws = make_draws(1, torch.Generator().manual_seed(0))
    nothing = torch.full((1,), float("-inf"))
    keys = torch.full((1,), LEAST_KEY)
    best, candidate, drawn, mass = draw(logits, torch.ones(1), nothing, keys, draws, impl=impl)
    assert best.item() == drawn.item() == float("-inf")
    assert 0 <= candidate.item() < 13
    assert mass.item() == 0.0


@pytest.mark.parametrize("name", ["scaled_logits", "largest_logit", "weigh", "draw"])
def test_no_ids(name):
    """A rank of a small vocabulary may have no ids."""
    logits, divisor = RowLogits(torch.zeros(2, 0), 0), torch.ones(2)
    keys = torch.zeros(2, 1, dtype=torch.int64)
    draws = make_draws(2, torch.Generator().manual_seed(0))
    arguments = {
        "scaled_logits": (),
        "largest_logit": (),
        "weigh": (divisor, keys, torch.cat([keys, keys + 5], dim=1)),
        "draw": (divisor, keys[:, 0], draws),
    }
    extra = {"by_mass": False} if name == "weigh" else {}
    result = getattr(vocab_statistics, name)(logits, divisor, *arguments[name], **extra)
    for tensor in result if isinstance(result, tuple) else (result,):
        assert tensor.shape[0] == 2


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=30))
def test_keys_compare_as_the_numbers_do(values):
    """Ordered keys compare as their numbers do, above the least key."""
    numbers = torch.tensor(values, dtype=torch.float32)
    keys = ordered_keys(numbers)
    assert torch.equal(keys[:, None] < keys[None, :], numbers[:, None] < numbers[None, :])
    assert int(keys.min()) > LEAST_KEY
    assert int(keys.max()) < 2**31 - 1


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda rows, one: scaled_logits(rows, torch.ones(3)), "projected"),
        (lambda rows, one: draw(rows._replace(first_id=2), one, one, None, None), "first_id"),
        (
            lambda rows, one: weigh(rows, one, one, one[:, None].expand(2, 3), None, by_mass=True),
            "pivots",
        ),
    ],
    ids=["rows", "first_id", "pivots"],
)
def test_bad_arguments_are_named(call, named):
    """A wrong argument is refused by name."""
    with pytest.raises(ValueError, match=named):
        call(RowLogits(torch.zeros(2, 8), 0), torch.ones(2))


@pytest.mark.parametrize("num_kept", [1, 9, 30, 40])
def test_a_filtered_draw_makes_noise_of_what_it_keeps(num_kept):
    """The reference makes noise of the kept ids alone where they are few, and draws the same."""
    rows, vocab = 70, 40
    generator = torch.Generator().manual_seed(num_kept)
    logits, divisor = torch.randn(rows, vocab, generator=generator), torch.ones(rows)
    draws = make_draws(rows, generator)
    maximum = logits.amax(-1)
    keys = ordered_keys(logits.sort(descending=True).values[:, num_kept - 1])
    with mock.patch.object(running_statistics, "random_words_of", wraps=random_words_of) as made:
        drawn = draw(RowLogits(logits, 0), divisor, maximum, keys, draws, impl="reference")
    num_made = sum(len(call.args[0]) for call in made.call_args_list)
    assert num_made == (rows * num_kept if num_kept <= vocab // 4 else 0)
    scores = torch.where(ordered_keys(logits) >= keys[:, None], logits, float("-inf"))
    scores = scores + draws.noise(vocab, 0)
    assert torch.equal(drawn.candidate, scores.argmax(-1))
    assert torch.equal(drawn.best, scores.amax(-1))
