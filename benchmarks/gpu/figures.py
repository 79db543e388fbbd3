"""The figures of the campaign's table: where each is in the rows, what is wanted of it, and what was predicted.

Predictions are of an H100 (SXM, by NVIDIA's data sheet 3.35 TB/s, 989 TFLOP/s in BF16 and 1,979 in FP8), and were
counted before any GPU ran. A pass takes, for its layers, its attention and its head, the longer of what 0.9 of the memory's
rate needs for their bytes and 0.6 of the tensor cores' for their products; launches are in graphs and take nothing, and
neither does the host. Experts are chosen at random, as random weights choose them. Of a canvas's passes stock has one more,
and moves 32 bytes of each logit. Attention is compared by the cycles that the compiled loop takes a key on SM90: the
larger of its instructions over four schedulers and of its products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from results import Found

Rows = list[dict[str, Any]]
# The number that a figure's rows hold; a LookupError if they do not.
Value = Callable[[Rows], float]
# Cycles a key of 64 query rows, ours and the others', as Triton 3.8 and the CuTe DSL compiled them. Of
# FlashAttention-4, which ``cute`` extends, and of ours in sliding layers these are the products'.
CYCLES = {
    "sliding": {"ours": 16, "stock-triton": 94.25, "stock-fa4": 16, "cute": 16},
    "full": {"ours": 55.12, "stock-triton": 96.75, "stock-fa4": 32, "cute": 32},
}


@dataclass(frozen=True)
class Figure:
    """A question that gpu-figures.md keeps open until the campaign answers it.

    Attributes:
        text: What is measured.
        experiments: Names of those whose rows it needs, separated by blanks.
        value: Its value in these rows.
        predicted: Of an H100; ``None`` where nothing was.
        least: The target that a value has to reach.
        most: The target that a value may not exceed.
        needs_all: Whether it is of all rows of an experiment, which one that was cut does not have.
    """

    text: str
    experiments: str
    value: Value
    predicted: float | None = None
    least: float | None = None
    most: float | None = None
    needs_all: bool = False

    @property
    def target(self) -> str:
        """The target in words."""
        if self.least is not None:
            return f"at least {self.least:g}"
        return "none" if self.most is None else f"at most {self.most:g}"

    def measured(self, found: Found) -> str | None:
        """The value, and whether the target is met; ``None`` while it is open."""
        # What had measured something when it was cut has measured that.
        states = ("done",) if self.needs_all else ("done", "cut")
        results = [found.get(name) for name in self.experiments.split()]
        usable = [result for result in results if result and result.state in states]
        if len(usable) < len(results):
            return None
        try:
            value = self.value([row for result in usable for row in result.rows])
        except LookupError:
            return None
        if self.least is None and self.most is None:
            return f"{value:.3g}"
        met = value >= self.least if self.least is not None else value <= self.most
        return f"{value:.3g}, {'met' if met else '**missed**'}"


def values(rows: Rows, column: str, /, **keys: Any) -> list[Any]:
    """The column in all rows that have these keys.

    Raises:
        LookupError: If none has.
    """
    found = [row.get(column) for row in rows if keys.items() <= row.items()]
    found = [value for value in found if value is not None]
    if not found:
        raise LookupError(column)
    return found


def cell(column: str, /, **keys: Any) -> Value:
    """The one value of a column in rows that have these keys."""

    def value(rows: Rows) -> float:
        found = values(rows, column, **keys)
        if len(found) > 1:
            raise LookupError(f"several rows have {keys}")
        return found[0]

    return value


def ratio(over: Value, under: Value) -> Value:
    """One value over another."""
    return lambda rows: over(rows) / under(rows)


def served(column: str, requests: int, side: str = "ours", **keys: Any) -> Value:
    """What a server did with so many requests at once."""
    return cell(column, table="serving", side=side, requests=requests, **keys)


def over_stock(column: str, requests: int, better: Callable[..., float]) -> Value:
    """Ours over the better one of stock as it comes and stock tuned."""
    ours, stock, tuned = (served(column, requests, side) for side in ("ours", "stock", "tuned"))
    return ratio(ours, lambda rows: better(stock(rows), tuned(rows)))


def wrong_kernels(rows: Rows) -> float:
    """Number of kernels and graphs that are not right; what the device itself does is not counted."""
    return sum(state != "right" for state in values(rows, "state", table="kernels"))


def exact_answers(rows: Rows) -> float:
    """Share of the shipped checkpoint's questions that were answered exactly."""
    return sum(values(rows, "exact", table="answers")) / sum(values(rows, "asked", table="answers"))


def cute_differs(rows: Rows) -> float:
    """Most that an entry of ``impl="cute"`` differs from Triton's."""
    return max(values([row for row in rows if row.get("which", "").startswith("cute")], "differs"))


def _serving() -> Iterator[Figure]:
    """Tokens a second and times to the first token beside stock's, and formats' speeds."""
    speed, first = "tokens_a_second", "ms_to_first"
    for experiment, limit, requests in (
        ("serving-both", 8, (1, 8)),
        ("serving-both-32", 32, (1, 8, 32)),
    ):
        for n in requests:
            for column, text in (
                (speed, "tokens a second"),
                (first, "median time to the first token"),
            ):
                at_once = f"over stock on the same GPU, both for {limit} requests at most"
                value = ratio(served(column, n), served(column, n, "stock"))
                yield Figure(f"{text}, requests: {n}; {at_once}", experiment, value)
    sides = "serving-ours serving-stock serving-tuned"
    for n, least, predicted, tokens in (
        (1, 1.1, 1.13, 1550),
        (8, 2, 1.27, 4530),
        (32, 2.5, 1.27, 4530),
    ):
        text, value = f"tokens a second, requests: {n}", over_stock(speed, n, max)
        yield Figure(f"{text}; over the better stock", sides, value, predicted, least=least)
        yield Figure(text, "serving-ours", served(speed, n), tokens)
    for n in (1, 8, 32):
        text = f"median time to the first token, requests: {n}; over the better stock"
        yield Figure(text, sides, over_stock(first, n, min), most=1)
    text = "median time to the first token, requests: 1, ms"
    yield Figure(text, "serving-ours", served(first, 1), 185)
    text = "a pass at 1 request, ms"
    yield Figure(text, "serving-ours", served("ms_a_pass", 1), 9.91, most=6.5)
    fp8 = {"table": "formats", "which": "fp8-dynamic, diffusion"}
    nvfp4 = {"table": "formats", "which": "nvfp4-weights, diffusion"}
    text = "FP8 at 1 request: share of what memory can read"
    yield Figure(text, "format-fp8-dynamic", cell("of_limit", **fp8), least=0.95)
    text = "NVFP4, weights only, over FP8, tokens a second"
    value = ratio(cell(speed, **nvfp4), cell(speed, **fp8))
    yield Figure(text, "format-fp8-dynamic format-nvfp4-weights", value, least=1.3)
    for n in (256, 2048):
        keys = {"table": "experts", "dtype": "fp8", "rows": n}
        value = ratio(cell("us_before", **keys), cell("us_tuned", **keys))
        yield Figure(f"tuned experts at {n} rows, FP8: time before over after", "experts", value)


def _ways() -> Iterator[Figure]:
    """DiffusionGemma's other ways; random weights keep one token of a draft, the certain one."""
    for n, causal, drafted in ((1, 626, 113), (8, 1690, 427), (32, 3150, 1380)):
        for rule, predicted in (("autoregressive", causal), ("linear_spec", drafted)):
            text = f"`rule: {rule}`, tokens a second, requests: {n}"
            yield Figure(text, "ways", served("tokens_a_second", n, rule), predicted)


def _families() -> Iterator[Figure]:
    """What masked families and a draft take, in shapes of published checkpoints."""
    for tokens, first_ms, pass_ms in ((8192, 50.5, 2.43), (32768, 258, 2.77), (122000, 2410, 3.98)):
        text, keys = (
            f"LLaDA2.2-mini, a prompt of {tokens}",
            {"model": "llada2.2-mini", "input": tokens},
        )
        first, a_pass = served("ms_to_first", 1, **keys), served("ms_a_pass", 1, **keys)
        yield Figure(f"{text}: ms to the first block", "llada2.2", first, first_ms)
        yield Figure(f"{text}: ms a pass", "llada2.2", a_pass, pass_ms)
    for name, experiment, step, alone, many in (
        ("llada2.1-mini", "llada2.1", 4, 575, 5380),
        ("sdar-8b", "sdar", 2, 389, 4580),
    ):
        for n, predicted in ((1, alone), (16, many)):
            text = f"{name}, {step} tokens a step: tokens a second at {n}"
            yield Figure(text, experiment, served("tokens_a_second", n, model=name), predicted)
    ours, stock, undrafted = (
        served("tokens_a_second", 1, side, model="qwen3-8b", drafted=drafted)
        for side, drafted in (("ours", True), ("stock", True), ("ours", False))
    )
    text = (
        "Qwen3-8B with a DFlash draft of which nothing is accepted: tokens a second over without it"
    )
    yield Figure(text, "draft draft-none", ratio(ours, undrafted), 0.827)
    yield Figure("the same draft: tokens a second over stock's", "draft", ratio(ours, stock), 1)


def _checks() -> Iterator[Figure]:
    """What must be right before anything is fast."""
    text = "kernels and their graphs, executed: those that are not as the reference, or as the eager call"
    yield Figure(text, "kernels", wrong_kernels, most=0, needs_all=True)
    text = (
        "the shipped checkpoint, default options: share of 240 held-out questions answered exactly"
    )
    yield Figure(text, "answers", exact_answers, least=0.95, needs_all=True)


def _attention() -> Iterator[Figure]:
    """Each peer's time over ours, of the mask that it can compute."""
    peers = ("stock-triton", "stock-fa4", "cute", "cute-unsplit", "unsplit")
    for layer, requests, context in (
        ("sliding", 1, 1024),
        ("sliding", 8, 8192),
        ("full", 1, 1024),
        ("full", 1, 32768),
        ("full", 8, 8192),
    ):
        shape = {"layer": layer, "requests": requests, "context": context}
        shape["anchor"] = "query" if layer == "sliding" else "canvas"
        cycles = CYCLES[layer]
        for peer in (*peers, "rows-64" if layer == "sliding" else "keys-16"):
            text = f"attention, {layer} layer, requests of {context} tokens: {requests}; {peer} over ours"
            predicted = cycles[peer] / cycles["ours"] if peer in cycles else None
            value = cell("of_ours", table="attention", which=peer, **shape)
            yield Figure(text, "attention", value, predicted)
    text = 'attention, `impl="cute"`: most that an entry differs from Triton\'s'
    yield Figure(text, "attention", cute_differs, most=0.02, needs_all=True)


def _sampling() -> Iterator[Figure]:
    """Stock's time over ours, and what settings add."""

    def sampled(canvases: int, which: str, column: str = "ms_graph") -> Value:
        return cell(column, table="sampler", canvases=canvases, which=which)

    for n in (1, 8, 32):
        value = ratio(sampled(n, "stock", "ms"), sampled(n, "ours"))
        yield Figure(f"sampling, canvases: {n}; stock over ours in a graph", "sampler", value)
    for setting in ("top_p", "top_k and top_p", "logprobs"):
        value = ratio(sampled(1, f"ours, {setting}, one canvas", "ms"), sampled(1, "ours", "ms"))
        text = f"sampling, one canvas, {setting}: over the same without"
        yield Figure(text, "sampler", value)

    def peak(rows: Rows) -> float:
        return max(values(rows, "bytes_a_logit", which="ours"))

    yield Figure("peak memory of sampling, bytes a logit", "sampler", peak, most=1, needs_all=True)


FIGURES = (*_serving(), *_ways(), *_families(), *_checks(), *_attention(), *_sampling())
