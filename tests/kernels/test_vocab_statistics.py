"""Tests of statistics of rows of logits, tile by tile, against whole rows in float64."""

import math
from dataclasses import fields
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attention_kernels.noise import gumbel_noise, random_words
from attention_kernels.testing import make_adjustments, make_draws
from attention_kernels.vocab_statistics import (
    RowDraws,
    RowLogits,
    RunningStatistics,
    add_product,
    update_statistics,
)
from attention_kernels.vocab_statistics import running as running_statistics
from attention_kernels.vocab_statistics.triton import update as triton_update
from attention_kernels.vocab_statistics.triton.logits import gumbel_bound

EPS = torch.finfo(torch.float32).eps
IMPLEMENTATIONS = ["reference", "triton"]
# Of the longer sweep: the kernels run some hundred times slower under the interpreter.
SWEPT = [("reference", 15), ("triton", 4)]


def stream(logits, draws, tile, impl, softcap=None, embedding=None, adjustments=None):
    """Return statistics and the probability-weighted embedding, in tiles of ``tile`` ids."""
    rows, vocab = logits.shape
    running = RunningStatistics.empty(rows, logits.device)
    soft = None if embedding is None else torch.zeros(rows, embedding.shape[1])
    for first in range(0, vocab, tile):
        part = logits[:, first : first + tile]
        weights = None if soft is None else torch.empty(part.shape)
        update_statistics(
            running,
            RowLogits(part, first, softcap, adjustments),
            draws,
            weights=weights,
            product=soft,
            impl=impl,
        )
        if soft is not None:
            soft += weights @ embedding[first : first + tile]
    return running, None if soft is None else soft / running.total[:, None]


def scaled(logits, draws, softcap, impl):
    """Divide as each implementation does, in float32, so that its rounding is not an error.

    The kernel multiplies by an inverse: a division on a GPU is not closer unless it costs much
    more.
    """
    x = logits.float()
    if softcap is not None:
        x = torch.tanh(x / softcap) * softcap
    temperature = draws.temperature[:, None]
    return x / temperature if impl == "reference" else x * (1 / temperature)


def check(logits, draws, tile, impl, softcap):
    rows, vocab = logits.shape
    embedding = torch.randn(vocab, 8, generator=torch.Generator().manual_seed(1))
    running, soft = stream(logits, draws, tile, impl, softcap, embedding)
    plain = scaled(logits, draws, softcap, impl)
    exact = plain.double()
    probs = exact.softmax(-1)
    candidate = running.candidate[:, None]
    drawn = probs.gather(1, candidate)[:, 0]
    plain_drawn = plain.softmax(-1).gather(1, candidate)[:, 0]

    exact_entropy = torch.distributions.Categorical(logits=exact).entropy()
    plain_entropy = torch.distributions.Categorical(logits=plain).entropy()
    for name, ours, theirs, truth in (
        ("entropy", running.entropy(), plain_entropy, exact_entropy),
        ("soft embedding", soft, plain.softmax(-1) @ embedding, probs @ embedding.double()),
        ("confidence", running.confidence(), plain.softmax(-1).amax(-1), probs.amax(-1)),
        ("drawn confidence", running.drawn_confidence(), plain_drawn, drawn),
    ):
        error = (ours.double() - truth).abs().max().item()
        # Sums of sums round more often than one sum; a capped logit is a difference of numbers
        # near the cap, whose last bit the temperature magnifies.
        rounding = EPS * max(1.0, truth.abs().max().item()) + EPS * (softcap or 0.0)
        budget = 4 * ((theirs.double() - truth).abs().max().item() + rounding)
        assert error <= budget, f"{name}: error {error:.2e} exceeds {budget:.2e}"
    # The argmax and the candidate are the best there is, up to what rounding can hide.
    rows_index = torch.arange(rows)
    hidden = 1e-5 * exact.abs().where(exact.isfinite(), 0.0).amax(-1).clamp(min=1.0)
    assert (exact[rows_index, running.argmax] >= exact.amax(-1) - hidden).all()
    words = random_words(draws.seed, draws.canvas_idx, draws.step, draws.position, vocab)
    greedy = draws.request_temperature == 0
    rate = torch.where(greedy, 1.0, draws.request_temperature).double()
    noise = torch.where(greedy[:, None], 0.0, gumbel_noise(words).double())
    scores = exact / rate[:, None] + noise
    chosen = scores[rows_index, running.candidate]
    assert (chosen >= scores.amax(-1) - hidden / rate - 1e-5).all()
    assert torch.equal(running.candidate[greedy], running.argmax[greedy])
    likeliest = running.candidate == running.argmax
    assert torch.equal(running.drawn_confidence()[likeliest], running.confidence()[likeliest])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3),
    vocab=st.integers(1, 4500),
    tile=st.integers(100, 1500).map(lambda groups: 4 * groups),
    scale=st.sampled_from([0.1, 3.0, 40.0]),
    softcap=st.sampled_from([None, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_vocab_statistics(impl, rows, vocab, tile, scale, softcap, dtype, seed):
    """Entropy, confidences, soft embedding, argmax and candidate are right for any tiles."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * scale).to(dtype)
    check(logits, make_draws(rows, generator), tile, impl, softcap)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=15, deadline=None)
@given(vocab=st.integers(5, 3000), tile=st.integers(100, 300), seed=st.integers(0, 2**31))
def test_impossible_ids(impl, vocab, tile, seed):
    """Minus infinity adds nothing and is never drawn, also where whole tiles are impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator) * 5
    allowed = torch.randint(0, vocab, (3,), generator=generator)
    logits[torch.arange(vocab)[None, :].expand(3, -1) != allowed[:, None]] = float("-inf")
    running, _ = stream(logits, make_draws(3, generator), 4 * tile, impl)
    assert torch.equal(running.candidate, allowed)
    assert torch.equal(running.argmax, allowed)
    assert torch.equal(running.entropy(), torch.zeros(3))
    assert torch.equal(running.confidence(), torch.ones(3))
    assert torch.equal(running.drawn_confidence(), torch.ones(3))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [1e-4, 1.0, 1e4])
def test_the_lowest_finite_logit_is_never_drawn(impl, temperature):
    """The lowest finite logit is never drawn and adds no entropy, even alone in a tile."""
    logits = torch.randn(12, 40, generator=torch.Generator().manual_seed(2))
    lowest = logits.clone()
    lowest[:, :17] = -1e30
    draws = make_draws(12, torch.Generator().manual_seed(0))
    draws = draws._replace(temperature=torch.full((12,), temperature))
    running, _ = stream(lowest, draws, 16, impl)
    assert (running.candidate >= 17).all()
    assert (running.argmax >= 17).all()
    x = logits[:, 17:].double() / temperature
    exact = torch.distributions.Categorical(logits=x).entropy()
    torch.testing.assert_close(running.entropy().double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_nothing_possible_has_no_confidence(impl):
    """A row without a possible id has confidence 0."""
    logits = torch.full((2, 40), float("-inf"))
    running, _ = stream(logits, make_draws(2, torch.Generator().manual_seed(0)), 16, impl)
    assert torch.equal(running.confidence(), torch.zeros(2))
    assert torch.equal(running.drawn_confidence(), torch.zeros(2))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_of_equal_logits_the_first_wins(impl):
    """Of equal logits the first is the argmax, across tiles and within one."""
    logits = torch.zeros(2, 64)
    logits[0, [20, 40]] = 3.0
    logits[1, [21, 23]] = 3.0
    draws = make_draws(2, torch.Generator().manual_seed(0))
    running, _ = stream(logits, draws, 16, impl)
    assert running.argmax.tolist() == [20, 21]


@pytest.mark.parametrize(("impl", "max_examples"), SWEPT)
def test_adjustments_are_applied_to_each_tile(impl, max_examples):
    """Statistics of adjusted logits equal those of logits adjusted before."""

    @settings(max_examples=max_examples, deadline=None)
    @given(vocab=st.integers(8, 3000), tile=st.integers(100, 1000), seed=st.integers(0, 2**31))
    def every_case(vocab, tile, seed):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(6, vocab, generator=generator) * 4
        draws = make_draws(6, generator)
        adjustments = make_adjustments(6, vocab, generator)
        ours, _ = stream(logits, draws, 4 * tile, impl, 30.0, adjustments=adjustments)
        capped = torch.tanh(logits / 30.0) * 30.0
        adjusted = adjustments.apply(capped, torch.arange(vocab))
        theirs, _ = stream(adjusted, draws, 4 * tile, "reference")
        assert torch.equal(ours.argmax, theirs.argmax)
        assert torch.equal(ours.candidate, theirs.candidate)
        torch.testing.assert_close(ours.entropy(), theirs.entropy(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.confidence(), theirs.confidence(), rtol=1e-4, atol=1e-5)
        # Of unlikely tokens too: the error is relative.
        drawn = ours.drawn_confidence()
        torch.testing.assert_close(drawn, theirs.drawn_confidence(), rtol=2e-4, atol=1e-30)

    every_case()


def without_skipping():
    """Run the kernel that makes noise for every block, whatever it holds."""
    return mock.patch.multiple(
        triton_update,
        _LARGEST_NOISE=tl.constexpr(math.inf),
        gumbel_bound=lambda v: v + float("inf"),
    )


@settings(max_examples=5, deadline=None)
@given(
    vocab=st.integers(1, 6000),
    tile=st.sampled_from([1024, 2048, 4096]),
    scale=st.sampled_from([0.0, 1.0, 10.0, 30.0, 1e4]),
    peaks=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_noise_that_cannot_decide_is_not_made(vocab, tile, scale, peaks, seed):
    """Skipping blocks that cannot win changes no bit of the results."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab, generator=generator) * scale
    # Nearly as high as the highest, where the bounds decide.
    for _ in range(peaks):
        at = int(torch.randint(vocab, (), generator=generator))
        logits[:, at] = logits.amax(-1) + torch.rand(4, generator=generator) * 30
    logits[3, torch.rand(vocab, generator=generator) < 0.5] = float("-inf")
    draws = make_draws(4, generator)
    skipping, _ = stream(logits, draws, tile, "triton")
    with without_skipping():
        whole, _ = stream(logits, draws, tile, "triton")
    for field in fields(whole):
        assert torch.equal(getattr(skipping, field.name), getattr(whole, field.name)), field.name


@triton.jit
def bound_kernel(v_ptr, out_ptr):
    at = tl.arange(0, 64)
    tl.store(out_ptr + at, gumbel_bound(tl.load(v_ptr + at)))


@pytest.mark.parametrize(
    ("drawing", "num_drawn"), [((), 0), ((70,), 64), ((0, 199), 64 + 8), (range(200), 200)]
)
def test_the_reference_makes_noise_only_near_rows_that_draw(drawing, num_drawn):
    """The reference works on 64 rows at a time, makes no noise where all of them are greedy, and
    its statistics are those of rows that come alone.
    """
    num_rows = 200
    temperature = torch.zeros(num_rows)
    temperature[list(drawing)] = 0.7
    generator = torch.Generator().manual_seed(0)
    draws = make_draws(num_rows, generator)._replace(request_temperature=temperature)
    logits = torch.randn(num_rows, 40, generator=generator)
    with mock.patch.object(running_statistics, "random_words", wraps=random_words) as words:
        together, _ = stream(logits, draws, 40, "reference")
    made = [len(call.args[0]) for call in words.call_args_list]
    assert sum(made) == num_drawn
    assert max(made, default=0) <= 64

    alone = [
        stream(logits[i : i + 1], RowDraws(*(x[i : i + 1] for x in draws)), 40, "reference")[0]
        for i in range(num_rows)
    ]
    for field in fields(together):
        rows = torch.cat([getattr(one, field.name) for one in alone])
        assert torch.equal(getattr(together, field.name), rows), field.name


@settings(max_examples=20, deadline=None)
@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
@example(words=[0, 1, 2**24, 2**25 + 1, 2**26 - 1, 2**26, 2**31, 2**32 - 1])
def test_noise_is_below_its_bound(words):
    """Noise is below its bound, and close to it where it is large."""
    v = ((torch.tensor(words, dtype=torch.int64).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    noise = gumbel_noise(torch.tensor(words, dtype=torch.int64))
    v = v.repeat(64)[:64].contiguous()
    bound = torch.empty(64)

    bound_kernel[(1,)](v, bound)
    bound = bound[: len(words)]
    assert (noise < bound).all()
    assert (noise > bound - 0.07)[noise > 5].all()


@pytest.mark.parametrize(
    ("function", "change", "named"),
    [
        (update_statistics, {"rows": RowLogits(torch.zeros(2, 8), 2)}, "first_id"),
        (update_statistics, {"rows": RowLogits(torch.zeros(3, 8), 0)}, "projected"),
        (update_statistics, {"rows": RowLogits(torch.zeros(2, 8).int(), 0)}, "projected"),
        (update_statistics, {"weights": torch.zeros(2, 7)}, "weights"),
        (update_statistics, {"product": torch.zeros(3, 4)}, "product"),
        (update_statistics, {"impl": "cute"}, "impl"),
        (add_product, {"product": torch.zeros(2, 5)}, "product"),
        (add_product, {"product": torch.zeros(2, 4).half()}, "product"),
        (add_product, {"embedding": torch.zeros(7, 4)}, "embedding"),
        (add_product, {"embedding": torch.zeros(8, 4).half()}, "embedding"),
    ],
)
def test_bad_arguments_are_named(function, change, named):
    """A wrong argument is refused by name."""
    given = {
        update_statistics: {
            "running": RunningStatistics.empty(2, torch.device("cpu")),
            "rows": RowLogits(torch.zeros(2, 8), 0),
            "draws": make_draws(2, torch.Generator().manual_seed(0)),
        },
        add_product: {
            "product": torch.zeros(2, 4),
            "weights": torch.zeros(2, 8),
            "embedding": torch.zeros(8, 4),
        },
    }
    with pytest.raises(ValueError, match=named):
        function(**(given[function] | change))


@pytest.mark.parametrize("num_rows", [1, 5, 256])
def test_empty_statistics_are_aligned(num_rows):
    """Each tensor starts at a multiple of 16 bytes, for which Triton's kernels were compiled."""
    running = RunningStatistics.empty(num_rows, torch.device("cpu"))
    for tensor in vars(running).values():
        assert tensor.shape == (num_rows,)
        assert tensor.is_contiguous()
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
    assert running.maximum.tolist() == running.best.tolist() == [float("-inf")] * num_rows
    assert running.total.tolist() == running.weighted.tolist() == [0.0] * num_rows
    assert running.argmax.dtype == running.candidate.dtype == torch.int64
