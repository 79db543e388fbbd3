"""Whether the Triton kernels, executed on this device, compute what the references do.

    python benchmarks/gpu/check_kernels.py             # the layers of DiffusionGemma-26B
    python benchmarks/gpu/check_kernels.py --toy

Attention and statistics are held to float64, from which they may be twice and four times as far as
the reference is in their own dtype. The words of the noise are equal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from checks import Checks, run_checks
from timing import device
from torch import Tensor

from attention_kernels.canvas_attention import AttentionOptions, Window, canvas_attention
from attention_kernels.noise import random_words
from attention_kernels.testing import (
    assert_within_error_budget,
    make_adjustments,
    make_canvas_batch,
    make_draws,
)
from attention_kernels.vocab_statistics import (
    CHUNK,
    LogitAdjustments,
    RowDraws,
    RowLogits,
    RunningStatistics,
    add_product,
    draw,
    largest_logit,
    least_weight,
    ordered_keys,
    update_statistics,
    weigh,
)

DEVICE = device()
SOFTCAP = 30.0
EPS = torch.finfo(torch.float32).eps
FP8 = torch.float8_e4m3fn


def attention_checks(toy: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """Both kinds of layer, in every kind of pass, short and split."""
    # Name, query heads, heads of the cache, head size, window.
    layers = [("sliding", 16, 8, 256, 1023), ("full", 16, 2, 512, -1)]
    canvas, contexts = 256, (300, 9000)
    if toy:
        layers = [("sliding", 2, 2, 16, 15), ("full", 2, 1, 32, -1)]
        canvas, contexts = 8, (21,)
    for name, num_heads, num_kv_heads, head_dim, window in layers:
        for context in contexts:
            passes = {
                "denoise": [(canvas, 0)] * 2,
                "fused": [(2 * canvas, canvas), (canvas, 0)],
                "prefill": [(canvas + 5, canvas + 5), (canvas, 0)],
            }
            for phase, rows in passes.items():
                for cache_dtype in (None, FP8):
                    if cache_dtype is not None and (toy or phase != "denoise"):
                        continue
                    batch = {
                        "query_lens": [length for length, _ in rows],
                        "seq_lens": [context + length for length, _ in rows],
                        "causal_rows": [causal for _, causal in rows],
                        "num_heads": num_heads,
                        "num_kv_heads": num_kv_heads,
                        "head_dim": head_dim,
                        "dtype": torch.float32 if toy else torch.bfloat16,
                        "cache_dtype": cache_dtype,
                        "padded_rows": 3,
                        "device": str(DEVICE),
                    }
                    kind = "fp8 cache" if cache_dtype else "bf16"
                    yield (
                        f"attention, {name}, {phase}, {context} tokens, {kind}",
                        lambda batch=batch, window=window: attention(batch, window),
                    )


def attention(described: dict, window: int) -> str:
    """One batch against float64."""
    batch = make_canvas_batch(**described)
    scale = described["head_dim"] ** -0.5
    options = AttentionOptions(scale, window=Window(window))
    scales = (0.5, 2.0) if batch.key_cache.dtype == FP8 else ()
    arguments = batch.arguments(options, scales=scales)
    got = canvas_attention(*arguments, impl="triton")
    same = canvas_attention(*arguments, impl="reference")
    key_factor, value_factor = scales or (1.0, 1.0)
    exact = replace(
        batch,
        query=batch.query.double(),
        key_cache=batch.key_cache.double() * key_factor,
        value_cache=batch.value_cache.double() * value_factor,
    )
    truth = canvas_attention(*exact.arguments(options), impl="reference")
    live = slice(batch.num_live_tokens)
    assert_within_error_budget(got[live], same[live], truth[live], "attention")
    return f"off by {(got[live].double() - truth[live]).abs().max().item():.1e}"


def on_device(values: RowDraws | LogitAdjustments) -> RowDraws | LogitAdjustments:
    """The same where the kernels run."""
    return type(values)(*(value.to(DEVICE) for value in values))


def statistics_checks(toy: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """A pass over the vocabulary in tiles, as projected and adjusted."""
    rows, vocab, tile = (3, 600, 256) if toy else (256, 65536, 4096)
    for dtype in (torch.float32,) if toy else (torch.float32, torch.bfloat16):
        for adjusted in (False, True):
            for scale in (12.0,) if toy else (0.5, 12.0):
                generator = torch.Generator().manual_seed(3)
                logits = (torch.randn(rows, vocab, generator=generator) * scale).to(DEVICE, dtype)
                draws = on_device(make_draws(rows, generator))
                adjustments = None
                if adjusted:
                    adjustments = on_device(make_adjustments(rows, vocab, generator))
                kind = "adjusted" if adjusted else "plain"
                given = (logits, draws, adjustments, tile)
                title = f"{str(dtype).removeprefix('torch.')}, {kind}, logits of {scale}"
                yield f"statistics, {title}", lambda given=given: statistics(*given)
                yield f"kept rows, {title}", lambda given=given: kept_rows(*given[:3])


def statistics(
    logits: Tensor, draws: RowDraws, adjustments: LogitAdjustments | None, tile: int
) -> str:
    """Entropy, soft embedding, argmax and candidate of both implementations, against float64."""
    rows, vocab = logits.shape
    embedding = torch.randn(vocab, 16, device=DEVICE).to(logits.dtype)
    found = {}
    least = least_weight(logits.dtype, vocab)
    for which in ("reference", "triton", "skipping"):
        impl = "reference" if which == "reference" else "triton"
        running = RunningStatistics.empty(rows, DEVICE)
        soft = torch.zeros(rows, 16, device=DEVICE)
        for first in range(0, vocab, tile):
            some = logits[:, first : first + tile]
            weights = torch.empty(some.shape, dtype=logits.dtype, device=DEVICE)
            of_tile = RowLogits(some, first, SOFTCAP, adjustments)
            flags = {}
            if which == "skipping":
                chunks = -(-some.shape[1] // CHUNK)
                occupied = torch.empty(rows, chunks, dtype=torch.uint8, device=DEVICE)
                flags = {"occupied": occupied, "least": least}
            update_statistics(
                running, of_tile, draws, weights=weights, product=soft, **flags, impl=impl
            )
            some_embeds = embedding[first : first + tile]
            if flags:
                add_product(soft, weights, some_embeds, flags["occupied"], impl=impl)
            else:
                soft += weights.float() @ some_embeds.float()
        found[which] = running, soft / running.total[:, None]
    exact = SOFTCAP * torch.tanh(logits.double() / SOFTCAP)
    if adjustments is not None:
        exact = adjustments.apply(exact, torch.arange(vocab, device=DEVICE)).double()
    exact = exact / draws.temperature.double()[:, None]
    probs = exact.softmax(-1)
    entropy = -torch.where(probs > 0, probs * probs.clamp(min=1e-300).log(), 0.0).sum(-1)
    (plain, plain_soft), (ours, ours_soft) = found["reference"], found["triton"]
    truth_soft = probs @ embedding.double()
    for name, got, same, truth in (
        ("entropy", ours.entropy(), plain.entropy(), entropy),
        ("soft embedding", ours_soft, plain_soft, truth_soft),
        ("confidence", ours.confidence(), plain.confidence(), probs.amax(-1)),
    ):
        error, theirs = ((each.double() - truth).abs().max().item() for each in (got, same))
        # A capped logit is a difference of numbers near the cap, whose last bit a temperature
        # magnifies; sums of sums round more often than one sum.
        rounding = EPS * (max(1.0, truth.abs().max().item()) + SOFTCAP)
        budget = 4 * (theirs + rounding)
        assert error <= budget, f"{name}: error {error:.2e} exceeds {budget:.2e}"
    skipped = (found["skipping"][1].double() - truth_soft).abs().max().item()
    bound = torch.finfo(logits.dtype).eps / 2 * embedding.abs().max().item()
    unskipped = (ours_soft.double() - truth_soft).abs().max().item()
    budget = 2 * unskipped + bound + 16 * EPS
    assert skipped <= budget, f"skipping: error {skipped:.2e} exceeds {budget:.2e}"
    # Equal up to what rounding decides: a logit at most a bit below the largest.
    bit = 1e-5 * exact.where(exact.isfinite(), 0.0).abs().amax(-1).clamp(min=1.0)
    largest = exact.gather(1, ours.argmax[:, None])[:, 0]
    assert (largest >= exact.amax(-1) - bit).all(), "an argmax is not the largest"
    torch.testing.assert_close(ours.best, plain.best, rtol=1e-5, atol=1e-4)
    same_draws = (ours.candidate == plain.candidate).float().mean().item()
    assert same_draws > 0.98, f"only {same_draws:.1%} of the candidates are the reference's"
    return f"entropy off by {(ours.entropy().double() - entropy).abs().max().item():.1e}"


def kept_rows(logits: Tensor, draws: RowDraws, adjustments: LogitAdjustments | None) -> str:
    """What filters ask of rows: counts are equal, masses to a rounding, draws to a tie."""
    rows = RowLogits(logits, 0, SOFTCAP, adjustments)
    divisor = draws.temperature
    maximum = largest_logit(rows, divisor, impl="reference")
    torch.testing.assert_close(
        largest_logit(rows, divisor, impl="triton"), maximum, rtol=1e-6, atol=1e-5
    )
    n = len(maximum)
    # Between what any two kernels could round apart.
    steps = torch.linspace(-20.0, -1.0, 16, device=DEVICE) + 0.0173
    pivots = ordered_keys((maximum[:, None] + steps).contiguous()).long()
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    bounds = torch.tensor([[least, most]], dtype=torch.int64, device=DEVICE).repeat(n, 1)
    for by_mass in (False, True):
        ours, plain = (
            weigh(rows, divisor, maximum, pivots, bounds, by_mass=by_mass, impl=impl).double()
            for impl in ("triton", "reference")
        )
        off = (ours - plain).abs() / plain.clamp(min=1.0)
        # A logit on a pivot may fall to either side.
        assert off.max() <= 1e-3, f"by_mass={by_mass}: off by {off.max().item():.1e}"
    keys = torch.full((n,), least, dtype=torch.int64, device=DEVICE)
    ours, plain = (
        draw(rows, divisor, maximum, keys, draws, impl=impl) for impl in ("triton", "reference")
    )
    torch.testing.assert_close(ours.best, plain.best, rtol=1e-5, atol=1e-4)
    return f"{(ours.candidate == plain.candidate).float().mean().item():.1%} of the draws the same"


def noise() -> str:
    """The generator's words are the same bits here and on the host."""
    draws = make_draws(16, torch.Generator().manual_seed(1))
    there = on_device(draws)
    words = [
        random_words(of.seed, of.canvas_idx, of.step, of.position, 4096) for of in (draws, there)
    ]
    assert torch.equal(words[0], words[1].cpu()), "other words than on the host"
    return "equal"


def checks(toy: bool) -> Checks:
    """Noise, attention and statistics."""
    return {"noise": noise, **dict(attention_checks(toy)), **dict(statistics_checks(toy))}


if __name__ == "__main__":
    sys.exit(run_checks("kernels", __doc__, checks))
