"""The figures of the campaign's table: where each is in the rows, what is wanted of it, and what
was predicted.

Predictions are of an H100 (SXM, by NVIDIA's data sheet 3.35 TB/s, 989 TFLOP/s in BF16 and 1,979 in
FP8), and were counted before any GPU ran. A pass takes, for its layers, its attention and its head,
the longer of what 0.9 of the memory's rate needs for their bytes and 0.6 of the tensor cores' for
their products; launches are in graphs and take nothing, and neither does the host. Experts are
chosen at random, as random weights choose them. Of a canvas's passes stock has one more, and moves
32 bytes of each logit; its attention is counted as ours. Kernels of attention are compared by the
cycles that the compiled loop takes a key on SM90: the larger of its instructions over four
schedulers and of its products.

Estimates were counted after the first GPUs ran, of an H200, with the rates that they had measured.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from results import Found

Rows = list[dict[str, Any]]
# The number that a figure's rows hold; a LookupError if they do not.
Value = Callable[[Rows], float]
# Columns of what servers did.
SPEED, FIRST = "tokens_a_second", "ms_to_first"
# Cycles a key of 64 query rows, ours and the others', as Triton 3.8 and the CuTe DSL compiled them.
# Of FlashAttention-4, which ``cute`` extends, and of ours in sliding layers these are the
# products'.
CYCLES = {
    "sliding": {"ours": 16, "stock-triton": 94.25, "stock-fa4": 16, "cute": 16},
    "full": {"ours": 55.12, "stock-triton": 96.75, "stock-fa4": 32, "cute": 32},
}


# The back end of stock that a target of a ratio is about: what vLLM chooses on Hopper where it is
# installed.
STOCK_AT_ITS_BEST = "FlashAttention 4"


def shown(value: float) -> str:
    """Return a number with three digits, or all those before the point."""
    return f"{math.floor(value + 0.5):,}" if value >= 100 else f"{value:.3g}"


def listed(numbers: Sequence[float | None]) -> str:
    """Return numbers side by side, a dash for each that is not known."""
    return ", ".join("-" if number is None else shown(number) for number in numbers)


@dataclass(frozen=True)
class Figure:
    """A question that gpu-figures.md keeps open until the campaign answers it.

    Attributes:
        text: What is measured; several values are in the order that it names.
        experiments: Names of those whose rows it needs, separated by blanks, in the campaign's
            order: the last completes it.
        values: Its values in these rows.
        predicted: Of an H100, value by value; empty where nothing was predicted.
        estimated: What was estimated since, of an H200; empty where nothing was.
        least: The targets that the values have to reach.
        most: The targets that the values may not exceed.
        sides: Servers of stock that it is a ratio to, whose attention back end is named beside it.
        peer: What else it is a ratio to.
        needs_all: Whether it is of all rows of an experiment, which one that was cut does not have.
    """

    text: str
    experiments: str
    values: tuple[Value, ...]
    predicted: tuple[float | None, ...] = ()
    estimated: str = ""
    least: tuple[float, ...] = ()
    most: tuple[float, ...] = ()
    sides: tuple[str, ...] = ()
    peer: str = ""
    needs_all: bool = False

    @property
    def target(self) -> str:
        """The targets in words; empty if there are none."""
        if self.least:
            with_what = f" of stock with {STOCK_AT_ITS_BEST}" if self.sides else ""
            return f"at least {listed(self.least)}{with_what}"
        return f"at most {listed(self.most)}" if self.most else ""

    @property
    def expected(self) -> str:
        """The predictions and the estimates."""
        estimated = f"estimated since: {self.estimated}" if self.estimated else ""
        return "; ".join(part for part in (listed(self.predicted), estimated) if part)

    def rows(self, found: Found) -> Rows | None:
        """The rows that its values are in; ``None`` where an experiment has none that count."""
        # What had measured something when it was cut has measured that.
        states = ("done",) if self.needs_all else ("done", "cut")
        results = [found.get(name) for name in self.experiments.split()]
        usable = [result for result in results if result and result.state in states]
        return None if len(usable) < len(results) else [row for one in usable for row in one.rows]

    def measured(self, found: Found) -> list[float | None] | None:
        """The values, each ``None`` where it was not measured; ``None`` if none was."""
        rows = self.rows(found)
        if rows is None:
            return None
        numbers = [_value_or_none(value, rows) for value in self.values]
        return None if all(number is None for number in numbers) else numbers

    def attention(self, found: Found, stock_attention: str | None) -> str:
        """The attention back end of the servers that it is a ratio to.

        Args:
            found: Results of one run.
            stock_attention: Stock's back end in this run, where its rows do not name it.

        Raises:
            ValueError: If neither names it: a ratio without it says nothing.
        """
        rows = self.rows(found) or []
        named = {row.get("attention", "not told") for row in rows if row.get("side") in self.sides}
        if stock_attention is not None:
            named = {stock_attention if name == "not told" else name for name in named}
        if not named or "not told" in named:
            raise ValueError(
                f"{self.text} ({self.experiments}): neither the rows nor facts.toml beside the results "
                'name stock\'s attention back end; write stock_attention = "..." there.'
            )
        return ", ".join(sorted(named))

    def verdict(self, numbers: Sequence[float | None], attention: str) -> str | None:
        """Whether the targets are met, in words; empty without a target, ``None`` while that is
        open.
        """
        if not self.target:
            return ""
        if self.sides and STOCK_AT_ITS_BEST not in attention:
            return None
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            return None
        pairs = zip(known, self.least or self.most, strict=True)
        met = all(number >= goal if self.least else number <= goal for number, goal in pairs)
        return f"{self.target}: {'met' if met else '**missed**'}"


def _value_or_none(value: Value, rows: Rows) -> float | None:
    try:
        return value(rows)
    except LookupError:
        return None


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


def pass_ms(requests: int, side: str = "ours") -> Value:
    """Milliseconds of a pass, with what prompts of other requests took of it.

    An answer has 1,024 tokens, 4 canvases of 17 passes; between its first token and its last lie
    three.
    """
    speed, first = served(SPEED, requests, side), served(FIRST, requests, side)
    return lambda rows: (1e3 * requests * 1024 / speed(rows) - first(rows)) / 51


def wrong_kernels(rows: Rows) -> float:
    """Number of kernels and graphs that are not right; what the device itself does is not
    counted.
    """
    return sum(state != "right" for state in values(rows, "state", table="kernels"))


def wrong_cute(rows: Rows) -> float:
    """Number of checks of ``impl="cute"`` that are not right.

    Raises:
        LookupError: If it refused layers whose cache is not FP8, the only one that it may refuse.
    """
    checks = [row for row in rows if row.get("what", "").endswith(", cute")]
    if not checks or any(
        "cute refuses" in row["found"] and "fp8" not in row["what"] for row in checks
    ):
        raise LookupError("cute")
    return sum(row["state"] != "right" for row in checks)


def exact_answers(rows: Rows) -> float:
    """Share of the shipped checkpoint's questions that were answered exactly."""
    return sum(values(rows, "exact", table="answers")) / sum(values(rows, "asked", table="answers"))


def cute_differs(rows: Rows) -> float:
    """Most that an entry of ``impl="cute"`` differs from Triton's."""
    return max(values([row for row in rows if row.get("which", "").startswith("cute")], "differs"))


def _at(numbers: Sequence[int]) -> str:
    """Return "at 1, 8 and 32 requests"."""
    *some, last = map(str, numbers)
    return f"at {', '.join(some)} and {last} requests"


def _serving() -> Iterator[Figure]:
    """Tokens a second and times to the first token beside stock's, and formats' speeds."""
    tokens, ratios, passes = (1550, 4530, 4530), (1.13, 1.27, 1.27), (9.91, 25.0, 99.8)
    for experiment, ns in (("serving-both-32", (1, 8, 32)), ("serving-both", (1, 8))):
        has_goal, count, at = len(ns) == 3, len(ns), _at(ns)
        yield Figure(
            f"tokens a second {at}",
            experiment,
            tuple(served(SPEED, n) for n in ns),
            tokens[:count],
        )
        yield Figure(
            f"tokens a second over stock's {at}",
            experiment,
            tuple(ratio(served(SPEED, n), served(SPEED, n, "stock")) for n in ns),
            ratios[:count],
            least=(1.5, 1.5, 1.5) if has_goal else (),
            sides=("stock",),
        )
        text = f"median ms to the first token {at}"
        yield Figure(text, experiment, tuple(served(FIRST, n) for n in ns), (185,))
        yield Figure(
            f"time to the first token over stock's {at}",
            experiment,
            tuple(ratio(served(FIRST, n), served(FIRST, n, "stock")) for n in ns),
            sides=("stock",),
        )
        yield Figure(
            f"a pass, ms, contexts of 4,100 to 5,100, {at}",
            experiment,
            tuple(pass_ms(n) for n in ns),
            passes[:count],
            "14 to 16, 45 to 48, 162 to 173" if has_goal else "",
            most=(10, 33, 115) if has_goal else (),
        )
        yield Figure(
            f"a pass of stock's, ms, {at}",
            experiment,
            tuple(pass_ms(n, "stock") for n in ns),
            sides=("stock",),
        )
    yield Figure(
        f"ours with `cute`: tokens a second over stock's {_at((1, 8, 32))}",
        "serving-cute-32",
        tuple(ratio(served(SPEED, n, "cute"), served(SPEED, n, "stock")) for n in (1, 8, 32)),
        least=(1.5, 1.5, 1.5),
        sides=("stock",),
    )
    ns, sides = (1, 8, 32), "serving-ours serving-stock serving-tuned"
    at = _at(ns)
    alone = tuple(served(SPEED, n) for n in ns)
    yield Figure(f"tokens a second {at}, alone on the GPU", "serving-ours", alone, tokens)
    for column, text, better in (
        (SPEED, "tokens a second", max),
        (FIRST, "median time to the first token", min),
    ):
        yield Figure(
            f"{text} {at}, over the better stock",
            sides,
            tuple(over_stock(column, n, better) for n in ns),
            ratios if better is max else (),
            most=() if better is max else (1, 1, 1),
            sides=("stock", "tuned"),
        )
    yield from _variants()
    fp8 = {"table": "formats", "which": "fp8-dynamic, diffusion"}
    nvfp4 = {"table": "formats", "which": "nvfp4-weights, diffusion"}
    text = "FP8 at 1 request: share of what memory can read"
    yield Figure(text, "format-fp8-dynamic", (cell("of_limit", **fp8),), least=(0.95,))
    text = "NVFP4, weights only, over FP8, tokens a second"
    value = ratio(cell(SPEED, **nvfp4), cell(SPEED, **fp8))
    yield Figure(text, "format-fp8-dynamic format-nvfp4-weights", (value,), least=(1.3,))
    yield Figure(
        "a layer's Triton experts, FP8, eager calls, µs: default tiles and tuned ones at 256 rows, then at 2,048",
        "experts",
        tuple(
            cell(column, table="experts", dtype="fp8", rows=n)
            for n in (256, 2048)
            for column in ("us_before", "us_tuned")
        ),
        estimated="CUTLASS, which serves, 273 to 317 and 433",
        peer="Triton's own default tiles",
    )


def _variants() -> Iterator[Figure]:
    """Both servers with other options than their defaults, and ours in the synchronous order."""
    for experiment, name, side in (
        ("serving-pages-64", "pages of 64", "ours"),
        ("serving-pages-64", "pages of 64, ours with `cute`", "cute"),
        ("serving-fp8-cache", "an FP8 cache", "ours"),
    ):
        yield Figure(
            f"{name}: tokens a second over stock's {_at((1, 8))}",
            experiment,
            tuple(ratio(served(SPEED, n, side), served(SPEED, n, "stock")) for n in (1, 8)),
            (1.13, 1.27),
            sides=("stock",),
        )
    # By the predictions of a pass and HOST_MS of startup/async_scheduling.py, 17 passes against 16.
    yield Figure(
        f"the synchronous order over the other: tokens a second {_at((1, 8, 32))}",
        "order",
        tuple(ratio(served(SPEED, n, "synchronous"), served(SPEED, n)) for n in (1, 8, 32)),
        (0.83, 0.955, 1.03),
        peer="ours, asynchronous",
    )


def _ways() -> Iterator[Figure]:
    """DiffusionGemma's other ways; random weights keep one token of a draft, the certain one."""
    ns = (1, 8, 32)
    for rule, predicted in (
        ("autoregressive", (626, 1690, 3150)),
        ("linear_spec", (113, 427, 1380)),
    ):
        text = f"`rule: {rule}`, tokens a second {_at(ns)}"
        yield Figure(text, "ways", tuple(served(SPEED, n, rule) for n in ns), predicted)


def _families() -> Iterator[Figure]:
    """What masked families and a draft take, in shapes of published checkpoints."""
    lengths = (8192, 32768, 122000)
    for column, text, predicted in (
        (FIRST, "ms to the first block", (50.5, 258, 2410)),
        ("ms_a_pass", "ms a pass", (2.43, 2.77, 3.98)),
    ):
        found = tuple(served(column, 1, model="llada2.2-mini", input=length) for length in lengths)
        text = f"LLaDA2.2-mini, prompts of 8,192, 32,768 and 122,000 tokens: {text}"
        yield Figure(text, "llada2.2", found, predicted)
    for name, experiment, step, predicted in (
        ("llada2.1-mini", "llada2.1", 4, (575, 5380)),
        ("sdar-8b", "sdar", 2, (389, 4580)),
    ):
        found = tuple(served(SPEED, n, model=name) for n in (1, 16))
        text = f"{name}, {step} tokens a step: tokens a second {_at((1, 16))}"
        yield Figure(text, experiment, found, predicted)
    ours, stock, undrafted = (
        served(SPEED, 1, side, model="qwen3-8b", drafted=drafted)
        for side, drafted in (("ours", True), ("stock", True), ("ours", False))
    )
    text = (
        "Qwen3-8B with a DFlash draft of which nothing is accepted: tokens a second over without it"
    )
    yield Figure(text, "draft draft-none", (ratio(ours, undrafted),), (0.827,), peer="no draft")
    text = "the same draft: tokens a second over stock's"
    yield Figure(text, "draft", (ratio(ours, stock),), (1,), sides=("stock",))


def _checks() -> Iterator[Figure]:
    """What must be right before anything is fast, and what the device reaches."""
    text = "kernels and graphs that are not as the reference, or as the eager call"
    yield Figure(text, "kernels", (wrong_kernels,), most=(0,), needs_all=True)
    text = (
        "the shipped checkpoint, default options: share of 240 held-out questions answered exactly"
    )
    yield Figure(text, "answers", (exact_answers,), least=(0.95,), needs_all=True)
    text = "the same server: answers that break the JSON schema that they were asked to follow"
    broken = cell("broken", table="grammars")
    yield Figure(text, "answers", (broken,), most=(0,), needs_all=True)
    rates = tuple(_probe(what) for what in ("copied, GB/s", "bf16 product, TFLOP/s"))
    yield Figure("memory copied, GB/s; a BF16 product, TFLOP/s", "kernels", rates, (3015, 593))


def _probe(what: str) -> Value:
    """What the device was found to reach; the rows hold it as text."""
    found = cell("found", table="probe", what=what)
    return lambda rows: float(found(rows))


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
        names = (*peers, "rows-64" if layer == "sliding" else "keys-16")
        yield Figure(
            f"attention, {layer} layer, requests of {context:,} tokens: {requests}; time over ours",
            "attention",
            tuple(cell("of_ours", table="attention", which=name, **shape) for name in names),
            tuple(
                round(cycles[name] / cycles["ours"], 3) if name in cycles else None
                for name in names
            ),
            peer=", ".join(names),
        )
    yield from _cute()
    # The script that measured it is in the history: profile_pass.py at c6a5fb6.
    calls = tuple(
        cell("us", table="pass", part="attention", canvases=canvases) for canvases in (1, 8)
    )
    yield Figure(
        "attention of all 30 layers by itself, ms, at 1 and 8 canvases, **1,556 keys each**",
        "pass",
        tuple(ratio(call, lambda rows: 1e3) for call in calls),
        (0.291, 2.33),
        "at 4,700 keys 1.5 to 2.1, 11 to 14",
    )


def _cute() -> Iterator[Figure]:
    """Whether ``impl="cute"`` is right and fast enough to be what ``auto`` chooses for a kind of
    layer.
    """
    text = 'attention, `impl="cute"`: checks beside the reference that are not right'
    yield Figure(text, "cute", (wrong_cute,), most=(0,), needs_all=True)
    for layer in ("sliding", "full"):
        experiment = f"attention-{layer}"
        text = f"`cute`, {layer} layer: most that an entry differs from Triton's"
        yield Figure(text, experiment, (cute_differs,), most=(0.02,), needs_all=True)
        # The served context decides; elsewhere it may be as slow as Triton's, within a median's
        # spread.
        shape = {"layer": layer, "anchor": "canvas", "which": "cute"}
        asked = [(context, n) for context in (4608, 1024, 16384) for n in (1, 8, 32)]
        yield Figure(
            f"`cute`, {layer} layer, 4,608, 1,024 and 16,384 keys, each {_at((1, 8, 32))}: time over Triton's",
            experiment,
            tuple(
                cell("of_ours", table="attention", requests=n, context=context, **shape)
                for context, n in asked
            ),
            most=tuple(0.8 if context == 4608 else 1.05 for context, _ in asked),
            peer="ours, Triton",
        )

    for layer in ("sliding", "full"):
        for name, anchor in (("cute", "canvas"), ("stock-fa4", "query")):
            # A full layer has no window, and one shape for both.
            anchor = anchor if layer == "sliding" else "canvas"
            shape = {"layer": layer, "context": 4608, "anchor": anchor}
            yield Figure(
                f"pages of 64, {layer} layer: time of `{name}` over Triton's {_at((1, 8))}",
                "attention-pages-64",
                tuple(
                    cell("of_ours", table="attention", which=name, requests=n, **shape)
                    for n in (1, 8)
                ),
                (round(CYCLES[layer][name] / CYCLES[layer]["ours"], 3),) * 2,
                peer="ours, Triton",
            )


def _products() -> Iterator[Figure]:
    """Back ends of products, over those that serve: a tenth faster at 256 rows and no slower at
    2,048.
    """
    peer = {"table": "products", "moe": "cutlass", "activations": "default"}
    for experiment, what, other, named in (
        ("products-humming", "experts", {"moe": "humming"}, "Humming, BF16 activations"),
        ("products-humming", "mlp", {"linear": "humming"}, "Humming, BF16 activations"),
        ("products-humming-fp8", "experts", {"activations": "fp8"}, "Humming, FP8 activations"),
        ("products-humming-fp8", "mlp", {"activations": "fp8"}, "Humming, FP8 activations"),
        (
            "products-triton-wheel",
            "experts",
            {"moe": "triton, wheel-h100 tiles"},
            "Triton with the wheel's tiles",
        ),
        ("products-triton-wheel", "mlp", {"linear": "torch"}, "cuBLASLt"),
        (
            "products-triton-tuned",
            "experts",
            {"moe": "triton, tuned tiles"},
            "Triton with tuned tiles",
        ),
    ):
        over = {"table": "products", "activations": "default", **other}
        yield Figure(
            f"{what} by {named}: time over CUTLASS's at 256 and 2,048 rows",
            f"products-cutlass {experiment}",
            tuple(
                ratio(
                    cell("us", what=what, rows=rows, **over),
                    cell("us", what=what, rows=rows, **peer),
                )
                for rows in (256, 2048)
            ),
            most=(0.9, 1),
            peer="CUTLASS",
        )


def _sampling() -> Iterator[Figure]:
    """Stock's time over ours, and what settings add, with the tile that serves."""
    at, tile = "at 1, 8 and 32 canvases", "ours, tiles of 32768"

    def sampled(canvases: int, which: str, column: str = "ms_graph") -> Value:
        return cell(column, table="sampler", canvases=canvases, which=which)

    def in_a_graph(canvases: int) -> Value:
        """Ours; rows of c6a5fb6 call a smaller tile so, and name this one."""
        named, served_tile = sampled(canvases, tile), sampled(canvases, "ours")

        def value(rows: Rows) -> float:
            found = _value_or_none(named, rows)
            return served_tile(rows) if found is None else found

        return value

    graphs = tuple(in_a_graph(n) for n in (1, 8, 32))
    text = f"sampling in a graph, tiles of 32,768 ids, ms, {at}"
    yield Figure(text, "sampler", graphs, (1.27, 10.2, 40.8))
    stock = tuple(
        ratio(sampled(n, "stock", "ms"), graph) for n, graph in zip((1, 8, 32), graphs, strict=True)
    )
    yield Figure(f"stock's sampling over that, {at}", "sampler", stock, peer="stock's functions")
    settings = ("top_p", "top_k and top_p", "logprobs")
    added = tuple(
        ratio(sampled(1, f"ours, {setting}, one canvas", "ms"), sampled(1, "ours", "ms"))
        for setting in settings
    )
    text = f"sampling one canvas with {'; '.join(settings)}: over the same without"
    yield Figure(text, "sampler", added, peer="the same without")

    def peak(rows: Rows) -> float:
        which = tile if any(row.get("which") == tile for row in rows) else "ours"
        return max(values(rows, "bytes_a_logit", which=which))

    yield Figure("its peak memory, bytes a logit", "sampler", (peak,), most=(1,), needs_all=True)


FIGURES = (
    *_serving(),
    *_ways(),
    *_families(),
    *_checks(),
    *_attention(),
    *_products(),
    *_sampling(),
)
