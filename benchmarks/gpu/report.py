"""What the campaign found, as one table; and the same into gpu-figures.md.

Only results of a GPU at full size are written into the document. What every experiment measured in
detail is in its result's file. Results of two commits or machines never meet in one figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import predictions
import results
from experiments import EXPERIMENTS
from records import DOCUMENT, markdown, write_part
from results import Origin, Result

Rows = list[dict[str, Any]]
Found = dict[str, Result]
# Of a server for each, as ``bench_serve.py`` names them.
SIDES = ("ours", "stock")
# The number that a question's rows hold; ``None`` if they do not.
Value = Callable[[Rows], float | None]


def cell(column: str, **keys: Any) -> Value:
    """The one value of a column in rows that have these keys."""

    def value(rows: Rows) -> float | None:
        values = [row[column] for row in rows if column in row and keys.items() <= row.items()]
        return values[0] if len(values) == 1 else None

    return value


def ratio(over: Value, under: Value) -> Value:
    """One value over another."""

    def value(rows: Rows) -> float | None:
        one, other = over(rows), under(rows)
        return None if one is None or not other else one / other

    return value


def over_stock(column: str, better: Callable[..., float], requests: int) -> Value:
    """Our value of serving over the better one of stock as it comes and stock tuned."""
    stock, tuned, ours = (
        cell(column, table="serving", side=side, requests=requests)
        for side in ("stock", "tuned", "ours")
    )

    def best(rows: Rows) -> float | None:
        values = [side(rows) for side in (stock, tuned)]
        return None if None in values else better(values)

    return ratio(ours, best)


def most(column: str, *names: str) -> Value:
    """The largest value in rows of the kernels with these names."""
    return lambda rows: max(
        (row[column] for row in rows if row.get("which") in names and column in row), default=None
    )


def wrong_kernels(rows: Rows) -> float | None:
    """Number of kernels and graphs that are not right; what the device itself does is not counted."""
    states = [row["state"] for row in rows if row["table"] == "kernels"]
    return sum(state != "right" for state in states) if states else None


def exact_answers(rows: Rows) -> float | None:
    """Share of the shipped checkpoint's questions that were answered exactly."""
    asked = sum(row["asked"] for row in rows if row["table"] == "answers")
    exact = sum(row["exact"] for row in rows if row["table"] == "answers")
    return exact / asked if asked else None


@dataclass(frozen=True)
class Figure:
    """A question that gpu-figures.md keeps open until the campaign answers it.

    Attributes:
        text: What is measured.
        experiments: Names of those whose rows it needs, separated by blanks.
        value: Its value in these rows.
        least: The target that a value has to reach.
        most: The target that a value may not exceed.
        predicted: The value that counts foretell of an H100; ``None`` where they foretell none.
        needs_all: Whether it is of all rows of an experiment, which one that was cut does not have.
    """

    text: str
    experiments: str
    value: Value
    least: float | None = None
    most: float | None = None
    predicted: float | None = None
    needs_all: bool = False

    @property
    def target(self) -> str:
        """The target in words."""
        if self.least is not None:
            return f"at least {self.least:g}"
        return "none" if self.most is None else f"at most {self.most:g}"

    def measured(self, found: Found) -> str | None:
        """The value, and whether the target is met; ``None`` while it is open."""
        mine = [found.get(name) for name in self.experiments.split()]
        # What had measured something when its time was up has measured that.
        states = ("done",) if self.needs_all else ("done", "cut")
        done = [one for one in mine if one is not None and one.state in states]
        value = self.value([row for one in done for row in one.rows])
        if value is None or len(done) < len(mine):
            return None
        if self.target == "none":
            return f"{value:.3g}"
        met = value >= self.least if self.least is not None else value <= (self.most or 0)
        return f"{value:.3g}, {'met' if met else '**missed**'}"


def _sampler(canvases: int, which: str, column: str = "ms_graph") -> Value:
    return cell(column, table="sampler", canvases=canvases, which=which)


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
        for peer in (*peers, "rows-64" if layer == "sliding" else "keys-16"):
            text = f"attention, {layer} layer, requests of {context} tokens: {requests}; {peer} over ours"
            value = cell("of_ours", table="attention", which=peer, **shape)
            whose = {"stock-triton": "stock", "stock-fa4": "FlashAttention-4"}
            whose["cute"] = whose["stock-fa4"]
            counted = predictions.attention_over_ours(layer, whose.get(peer, peer))
            yield Figure(text, "attention", value, predicted=counted)


def _sampling() -> Iterator[Figure]:
    """Stock's time over ours, what settings add, and what our variants gain."""
    for n in (1, 8, 32):
        value = ratio(_sampler(n, "stock", "ms"), _sampler(n, "ours"))
        yield Figure(f"sampling, canvases: {n}; stock over ours in a graph", "sampler", value)
    for setting in ("top_p", "top_k and top_p", "logprobs"):
        asked = _sampler(1, f"ours, {setting}, one canvas", "ms")
        text = f"sampling, one canvas, {setting}: over the same without"
        yield Figure(text, "sampler", ratio(asked, _sampler(1, "ours", "ms")))
    for n in (1, 8):
        for share in ("0%", "50%", "90%", "100%"):
            rows = f"{share} of the rows settled"
            value = ratio(_sampler(n, f"ours, {rows}"), _sampler(n, f"ours, skipping, {rows}"))
            text = f"sampling, canvases: {n}; {rows}: `skip_unlikely` false over true"
            yield Figure(text, "sampler-variants", value)
    yield Figure(
        "peak memory of sampling, bytes a logit",
        "sampler",
        most("bytes_a_logit", "ours"),
        most=1,
        needs_all=True,
    )


def _serving() -> Iterator[Figure]:
    """Tokens a second and times to the first token beside stock's, and formats' speeds."""
    sides = "serving-ours serving-stock serving-tuned"
    gemma = predictions.GEMMA
    for n, limit, experiment in (
        (1, 8, "serving-both"),
        (8, 8, "serving-both"),
        (1, 32, "serving-both-32"),
        (8, 32, "serving-both-32"),
        (32, 32, "serving-both-32"),
    ):
        for column, words in (
            ("tokens_a_second", "tokens a second"),
            ("ms_to_first", "median time to the first token"),
        ):
            both = (cell(column, table="serving", side=side, requests=n) for side in SIDES)
            at_once = f"over stock on the same GPU, both for {limit} requests at most"
            yield Figure(f"{words}, requests: {n}; {at_once}", experiment, ratio(*both))
    for n, least in ((1, 1.1), (8, 2), (32, 2.5)):
        value = over_stock("tokens_a_second", max, n)
        text = f"tokens a second, requests: {n}; over the better stock"
        yield Figure(text, sides, value, least=least, predicted=gemma.over_stock(n))
        value = cell("tokens_a_second", table="serving", side="ours", requests=n)
        text = f"tokens a second, requests: {n}"
        yield Figure(text, "serving-ours", value, predicted=gemma.tokens_a_second(n))
    for n in (1, 8, 32):
        value = over_stock("ms_to_first", min, n)
        text = f"median time to the first token, requests: {n}; over the better stock"
        yield Figure(text, sides, value, most=1)
    value = cell("ms_to_first", table="serving", side="ours", requests=1)
    text = "median time to the first token, requests: 1, ms"
    yield Figure(text, "serving-ours", value, predicted=gemma.first_ms())
    value = cell("ms_a_pass", table="serving", side="ours", requests=1)
    text = "a pass at 1 request, ms"
    yield Figure(text, "serving-ours", value, most=6.5, predicted=gemma.pass_ms())
    fp8, nvfp4 = (
        {"table": "formats", "which": f"{name}, diffusion"}
        for name in ("fp8-dynamic", "nvfp4-weights")
    )
    yield Figure(
        "FP8 at 1 request: share of what memory can read",
        "format-fp8-dynamic",
        cell("of_limit", **fp8),
        least=0.95,
    )
    yield Figure(
        "NVFP4, weights only, over FP8, tokens a second",
        "format-fp8-dynamic format-nvfp4-weights",
        ratio(cell("tokens_a_second", **nvfp4), cell("tokens_a_second", **fp8)),
        least=1.3,
    )
    for n in (256, 2048):
        keys = {"table": "experts", "dtype": "fp8", "rows": n}
        value = ratio(cell("us_before", **keys), cell("us_tuned", **keys))
        yield Figure(f"tuned experts at {n} rows, FP8: time before over after", "experts", value)


def _ways() -> Iterator[Figure]:
    """DiffusionGemma's three ways; random weights keep one token of a draft, the certain one."""
    for n in (1, 8, 32):
        predicted = predictions.by_way(n, kept=1)
        for rule in ("autoregressive", "linear_spec"):
            value = cell("tokens_a_second", table="serving", side=rule, requests=n)
            text = f"`rule: {rule}`, tokens a second, requests: {n}"
            yield Figure(text, "ways", value, predicted=predicted[rule])


def _families() -> Iterator[Figure]:
    """What masked families and a draft take, in shapes of published checkpoints."""
    ours = {"table": "serving", "side": "ours"}
    for tokens in predictions.LONG_PROMPTS:
        expected = predictions.long_prompt(tokens)
        for column, text, predicted in (
            ("ms_to_first", "ms to the first block", expected.first_ms()),
            ("ms_a_pass", "ms a pass", expected.pass_ms()),
        ):
            value = cell(column, model="llada2.2-mini", input=tokens, requests=1, **ours)
            text = f"LLaDA2.2-mini, a prompt of {tokens}: {text}"
            yield Figure(text, "llada2.2", value, predicted=predicted)
    for name, experiment, serving in (
        ("llada2.1-mini", "llada2.1", predictions.LLADA),
        ("sdar-8b", "sdar", predictions.SDAR),
    ):
        for n in (1, 16):
            value = cell("tokens_a_second", model=name, requests=n, **ours)
            text = (
                f"{name}, {serving.canvas // serving.steps} tokens a step: tokens a second at {n}"
            )
            yield Figure(text, experiment, value, predicted=serving.tokens_a_second(n))
    drafted, alone = (
        {"table": "serving", "model": "qwen3-8b", "requests": 1, "drafted": drafted}
        for drafted in (True, False)
    )
    ours_drafted = cell("tokens_a_second", side="ours", **drafted)
    yield Figure(
        "Qwen3-8B with a DFlash draft of which nothing is accepted: tokens a second over without it",
        "draft draft-none",
        ratio(ours_drafted, cell("tokens_a_second", side="ours", **alone)),
        predicted=predictions.with_draft_over_without(),
    )
    yield Figure(
        "the same draft: tokens a second over stock's",
        "draft",
        ratio(ours_drafted, cell("tokens_a_second", side="stock", **drafted)),
        predicted=1,
    )


FIGURES = (
    *_serving(),
    *_ways(),
    *_families(),
    Figure(
        "kernels and their graphs, executed: those that are not as the reference, or as the eager call",
        "kernels",
        wrong_kernels,
        most=0,
        needs_all=True,
    ),
    Figure(
        "the shipped checkpoint, default options: share of 240 held-out questions answered exactly",
        "answers",
        exact_answers,
        least=0.95,
        needs_all=True,
    ),
    *_attention(),
    Figure(
        'attention, `impl="cute"`: most that an entry differs from Triton\'s',
        "attention",
        most("differs", "cute", "cute-unsplit", "cute-split-4"),
        most=0.02,
        needs_all=True,
    ),
    *_sampling(),
)


def place(origin: Origin) -> str:
    """Where results come from, in a line."""
    machine = origin.machine
    chip = machine["gpu"] or "CPU"
    versions = [f"{name} {machine[name]}" for name in ("torch", "triton", "vllm") if machine[name]]
    driver = [f"driver {machine['driver']}"] if machine["driver"] else []
    return ", ".join([chip, *driver, *versions, f"commit {origin.commit[:12]}"])


def is_measured(origin: Origin) -> bool:
    """Whether results say something about a GPU."""
    return origin.machine["gpu"] is not None and not origin.toy


def states(origin: Origin, found: Found) -> str:
    """What ran of one run, and why the rest did not."""
    started = min(result.started for result in found.values())
    rehearsal = "A rehearsal: it shows that the campaign runs, and nothing else.\n\n"
    rows = []
    for name in (experiment.name for experiment in EXPERIMENTS):
        if (result := found.get(name)) is None:
            rows.append([name, "not run", None, "nobody asked for it", None])
            continue
        reason = result.reason.replace("|", "\\|")
        rows.append([name, result.state, result.seconds, reason, f"`{result.command}`"])
    return (
        f"### {started[:10]}, {place(origin)}\n\n"
        + rehearsal * (not is_measured(origin))
        + markdown(["experiment", "state", "seconds", "why", "command"], rows)
    )


def table(groups: list[tuple[Origin, Found]]) -> str:
    """Every figure with what GPUs measured of it, each where it was measured; and what ran."""
    groups = [group for group in groups if is_measured(group[0])]
    rows = []
    for figure in FIGURES:
        measured = [
            f"{value} ({origin.machine['gpu']}, {origin.commit[:7]})"
            for origin, found in groups
            if (value := figure.measured(found)) is not None
        ]
        names = ", ".join(f"`{name}`" for name in figure.experiments.split())
        predicted = "" if figure.predicted is None else f"{figure.predicted:.3g}"
        rows.append([figure.text, figure.target, predicted, names, "; ".join(measured) or "open"])
    heads = ["figure", "target", "predicted, H100", "experiment", "measured"]
    return "\n".join([markdown(heads, rows), *(states(*group) for group in groups)])


def run(options: argparse.Namespace) -> int:
    """Print the table, or write it into the document."""
    missing = [str(folder) for folder in options.folders if not folder.is_dir()]
    try:
        if options.folders and options.write:
            raise ValueError(
                f"--write takes what is kept in {results.RESULTS}; copy a folder there first"
            )
        if missing:
            raise ValueError(f"no such folder: {', '.join(missing)}")
        groups = results.read_all(options.folders or results.kept())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rehearsals = [group for group in groups if not is_measured(group[0])]
    if options.write:
        write_part("campaign", table(groups))
        for origin, _ in rehearsals:
            print(f"left out, since no GPU took part: {place(origin)}", file=sys.stderr)
        print(DOCUMENT)
    else:
        print(table(groups), *(states(*group) for group in rehearsals), sep="\n")
    return 0
