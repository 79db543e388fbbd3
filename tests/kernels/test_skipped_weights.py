"""Weights that a soft embedding cannot hold are zeros, and chunks of zeros are not multiplied."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attention_kernels.testing import make_draws
from attention_kernels.vocab_statistics import (
    CHUNK,
    RowDraws,
    RowLogits,
    RunningStatistics,
    add_product,
    least_weight,
    update_statistics,
)

# Triton's interpreter multiplies no bfloat16; on a GPU benchmarks/gpu/check_gpu.py has it do so.
DTYPES = {
    "reference": [torch.float32, torch.bfloat16],
    "triton": [torch.float32, torch.float16],
}
IMPLEMENTATIONS = list(DTYPES)


def stream(logits, draws, tile, impl, embedding, least):
    """Statistics, the soft embedding, and each id's weight in the tile that it was in."""
    rows, vocab = logits.shape
    running = RunningStatistics.empty(rows, logits.device)
    soft = torch.zeros(rows, embedding.shape[1])
    weights = torch.empty(rows, vocab, dtype=embedding.dtype)
    for first in range(0, vocab, tile):
        ids = slice(first, min(first + tile, vocab))
        part = weights[:, ids].contiguous()
        chunks = -(-part.shape[1] // CHUNK)
        # Whatever was in this memory before.
        occupied = torch.full((rows, chunks), 77, dtype=torch.uint8)
        flags = {} if least is None else {"occupied": occupied, "least": least}
        update_statistics(
            running,
            RowLogits(logits[:, ids], first),
            draws,
            weights=part,
            product=soft,
            **flags,
            impl=impl,
        )
        if least is None:
            soft += part.float() @ embedding[ids].float()
        else:
            padded = torch.nn.functional.pad(part != 0, (0, chunks * CHUNK - part.shape[1]))
            assert torch.equal(occupied.bool(), padded.unflatten(1, (-1, CHUNK)).any(-1))
            assert occupied.max() <= 1
            add_product(soft, part, embedding[ids], occupied, impl=impl)
        weights[:, ids] = part
    return running, soft / running.total[:, None], weights


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocab=st.integers(1, 4500),
    tile=st.integers(1, 1200).map(lambda groups: 4 * groups),
    scale=st.sampled_from([0.0, 1.0, 6.0, 30.0]),
    peaks=st.integers(0, 2),
    impossible=st.sampled_from([0.0, 0.5, 0.999]),
    is_wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_what_is_skipped_is_bounded(
    impl, rows, vocab, tile, scale, peaks, impossible, is_wide, seed
):
    """By mass and in the soft embedding, in float64; nothing else differs by a bit."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[impl][1 - is_wide]
    logits = torch.randn(rows, vocab, generator=generator) * scale
    for _ in range(peaks):
        at = int(torch.randint(vocab, (), generator=generator))
        logits[:, at] = logits.amax(-1) + torch.rand(rows, generator=generator) * 30
    logits[torch.rand(rows, vocab, generator=generator) < impossible] = float("-inf")
    # A row needs one that is possible.
    logits[:, int(torch.randint(vocab, (), generator=generator))] = 0.0
    draws = make_draws(rows, generator)
    embedding = torch.randn(vocab, 40, generator=generator).to(dtype)
    tile = max(tile, 400)

    whole, dense, weights = stream(logits, draws, tile, impl, embedding, None)
    least = least_weight(dtype, vocab)
    skipping, soft, kept = stream(logits, draws, tile, impl, embedding, least)
    for field in fields(whole):
        assert torch.equal(getattr(whole, field.name), getattr(skipping, field.name)), field.name
    assert torch.equal(kept, torch.where(kept == 0, 0.0, weights))
    assert (weights[kept == 0] <= least).all()

    probs = (logits.double() / draws.temperature.double()[:, None]).softmax(-1)
    unit = torch.finfo(dtype).eps / 2
    assert ((kept == 0) * probs).sum(-1).max() <= unit
    exact = probs @ embedding.double()
    rounding = 16 * torch.finfo(torch.float32).eps
    largest = embedding.abs().max().item()
    error, unskipped = ((each.double() - exact).abs().max().item() for each in (soft, dense))
    assert error <= unskipped + (unit + rounding) * largest


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_wide", [True, False])
def test_rows_at_the_bound(impl, is_wide):
    """Of a flat row nothing is skipped, nor of one just above the bound; just below it, all but one."""
    vocab, dtype = 2000, DTYPES[impl][1 - is_wide]
    least = least_weight(dtype, vocab)
    logits = torch.zeros(3, vocab)
    logits[1:, 1:] = torch.tensor([math.log(least)]) + torch.tensor([[1e-3], [-1e-3]])
    draws = make_draws(3, torch.Generator().manual_seed(0))
    draws = draws._replace(temperature=torch.ones(3))
    embedding = torch.ones(vocab, 1, dtype=dtype)
    running, soft, kept = stream(logits, draws, 1024, impl, embedding, least)
    assert (kept != 0).sum(-1).tolist() == [vocab, vocab, 1]
    # Of embeddings of 1, as much is missing as mass: nearly all that may be.
    missing = 1 - soft[:, 0].double()
    unit = torch.finfo(dtype).eps / 2
    assert missing[2] <= unit
    mass = (vocab - 1) * math.exp(math.log(least) - 1e-3)
    assert mass > 0.99 * unit * (1 - 1 / vocab)
    torch.testing.assert_close(running.total[2].item(), 1 + mass, rtol=1e-5, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 150),
    num_ids=st.integers(1, 4500),
    hidden=st.integers(1, 150),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    is_wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(rows=130, num_ids=4500, hidden=140, share=0.02, is_wide=False, seed=1)
def test_product(impl, rows, num_ids, hidden, share, is_wide, seed):
    """As with all chunks; those without weights are not read, whatever their embeddings are."""
    dtype = DTYPES[impl][1 - is_wide]
    generator = torch.Generator().manual_seed(seed)
    chunks = -(-num_ids // CHUNK)
    # The first rows have chunks of their own, so that groups of rows differ.
    is_occupied = torch.rand(2, chunks, generator=generator) < share
    occupied = is_occupied[(torch.arange(rows) >= 64).long()].to(torch.uint8)
    weights = torch.rand(rows, num_ids, generator=generator)
    weights = (weights * occupied.repeat_interleave(CHUNK, 1)[:, :num_ids]).to(dtype)
    embedding = torch.randn(num_ids, hidden, generator=generator)
    nobody = ~is_occupied[: 1 + (rows > 64)].any(0).repeat_interleave(CHUNK)[:num_ids]
    product = torch.randn(rows, hidden, generator=generator)
    exact = product.double() + weights.double() @ embedding.to(dtype).double()
    embedding[nobody] = float("nan")
    add_product(product, weights, embedding.to(dtype), occupied, impl=impl)
    # The reference's product is rounded to the dtype of the weights.
    scale = 4 * torch.finfo(dtype if impl == "reference" else torch.float32).eps
    magnitude = (weights.double() @ embedding.nan_to_num().double().abs()).max().item() + 3
    assert (product.double() - exact).abs().max() <= scale * magnitude


def test_a_row_does_not_depend_on_its_neighbours():
    """Bit for bit: what others have chunks for adds zeros to it."""
    generator = torch.Generator().manual_seed(0)
    num_ids, hidden = 1000, 40
    chunks = -(-num_ids // CHUNK)
    occupied = (torch.rand(6, chunks, generator=generator) < 0.3).to(torch.uint8)
    weights = torch.rand(6, num_ids, generator=generator)
    weights *= occupied.repeat_interleave(CHUNK, 1)[:, :num_ids]
    embedding = torch.randn(num_ids, hidden, generator=generator)
    together = torch.zeros(6, hidden)
    add_product(together, weights, embedding, occupied, impl="triton")
    for row in range(6):
        alone = torch.zeros(1, hidden)
        some = slice(row, row + 1)
        add_product(alone, weights[some], embedding, occupied[some], impl="triton")
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"product": torch.zeros(2, 5)}, "product"),
        ({"product": torch.zeros(2, 4, dtype=torch.float16)}, "product"),
        ({"embedding": torch.zeros(7, 4)}, "embedding"),
        ({"embedding": torch.zeros(8, 4, dtype=torch.float16)}, "embedding"),
        ({"occupied": torch.zeros(2, 2, dtype=torch.uint8)}, "occupied"),
        ({"occupied": torch.zeros(2, 1)}, "occupied"),
        ({"impl": "cute"}, "impl"),
    ],
)
def test_wrong_products_are_named(change, named):
    given = {
        "product": torch.zeros(2, 4),
        "weights": torch.zeros(2, 8),
        "embedding": torch.zeros(8, 4),
        "occupied": torch.zeros(2, 1, dtype=torch.uint8),
    }
    with pytest.raises(ValueError, match=named):
        add_product(**(given | change))


def test_flags_need_weights():
    zeros = torch.zeros(2, dtype=torch.int32)
    draws = RowDraws(torch.ones(2), torch.ones(2), zeros.long(), zeros, zeros, zeros)
    running = RunningStatistics.empty(2, zeros.device)
    with pytest.raises(ValueError, match="occupied"):
        update_statistics(
            running,
            RowLogits(torch.zeros(2, 8), 0),
            draws,
            occupied=torch.zeros(2, 1, dtype=torch.uint8),
        )
