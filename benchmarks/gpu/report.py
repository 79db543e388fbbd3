"""What the campaign found, as tables; and the same into RESULTS.md and docs/operate/what-was-run.md.

Only results of a GPU at full size are written into the documents. Results of two commits or machines
stand apart, each under its own heading.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from experiments import EXPERIMENTS
from machine import ROOT
from results import Origin, Result

BEGIN, END = "<!-- campaign -->\n", "<!-- end of campaign -->\n"
Rows = list[dict[str, Any]]
Found = dict[str, Result]


@dataclass(frozen=True)
class Figure:
    """A question that RESULTS.md keeps open until the campaign answers it.

    Attributes:
        text: What is measured.
        target: In words; empty for none.
        experiments: Whose results it needs.
        value: Of all rows of these; ``None`` if they do not hold it.
        holds: Whether a value meets the target; ``None`` for none.
        form: How a value is written.
    """

    text: str
    target: str
    experiments: tuple[str, ...]
    value: Callable[[Rows], float | str | None]
    holds: Callable[[Any], bool] | None = None
    form: str = "{}"

    def measured(self, found: Found) -> str | None:
        """The value, and whether the target is met; ``None`` while it is open."""
        mine = [found[name] for name in self.experiments if name in found]
        if len(mine) < len(self.experiments) or any(one.state != "done" for one in mine):
            return None
        value = self.value([row for one in mine for row in one.rows])
        if value is None:
            return None
        verdict = "" if self.holds is None else ", met" if self.holds(value) else ", **missed**"
        return self.form.format(value) + verdict


def _pick(rows: Rows, column: str, **keys: Any) -> float | None:
    """The one value of a column in rows that have these keys."""
    values = [
        row[column]
        for row in rows
        if column in row and all(row.get(key) == value for key, value in keys.items())
    ]
    return values[0] if len(values) == 1 else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _throughput(requests: int) -> Callable[[Rows], float | None]:
    """Ours over the better stock."""

    def value(rows: Rows) -> float | None:
        speed = {
            side: _pick(rows, "tokens_a_second", table="serving", side=side, requests=requests)
            for side in ("ours", "stock", "tuned")
        }
        if None in speed.values():
            return None
        return _ratio(speed["ours"], max(speed["stock"], speed["tuned"]))

    return value


def _first_token(requests: int) -> Callable[[Rows], float | None]:
    """Ours over the better stock."""

    def value(rows: Rows) -> float | None:
        times = {
            side: _pick(rows, "ms_to_first", table="serving", side=side, requests=requests)
            for side in ("ours", "stock", "tuned")
        }
        if None in times.values():
            return None
        return _ratio(times["ours"], min(times["stock"], times["tuned"]))

    return value


def _attention(layer: str, requests: int, context: int, peer: str) -> Callable[[Rows], Any]:
    """A peer's time over ours, of the mask that it can compute."""
    anchor = "query" if layer == "sliding" else "canvas"
    shape = {"layer": layer, "requests": requests, "context": context, "anchor": anchor}
    return lambda rows: _pick(rows, "of_ours", table="attention", which=peer, **shape)


def _sampler(canvases: int) -> Callable[[Rows], float | None]:
    """Stock's time over ours, as a graph."""

    def value(rows: Rows) -> float | None:
        which = {"table": "sampler", "canvases": canvases}
        stock = _pick(rows, "ms", which="stock", **which)
        return _ratio(stock, _pick(rows, "ms_graph", which="ours", **which))

    return value


def _variant(canvases: int, over: str, which: str) -> Callable[[Rows], float | None]:
    """One way's time as a graph over another's; both are ours."""

    def value(rows: Rows) -> float | None:
        one = {"table": "sampler", "canvases": canvases}
        return _ratio(
            _pick(rows, "ms_graph", which=over, **one), _pick(rows, "ms_graph", which=which, **one)
        )

    return value


def _setting(name: str) -> Callable[[Rows], float | None]:
    """What a setting of one canvas makes of the eager call's time."""

    def value(rows: Rows) -> float | None:
        one = {"table": "sampler", "canvases": 1}
        asked = _pick(rows, "ms", which=f"ours, {name}, one canvas", **one)
        return _ratio(asked, _pick(rows, "ms", which="ours", **one))

    return value


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural * (number != 1)}"


def _bytes(rows: Rows) -> float | None:
    found = [row["bytes_a_logit"] for row in rows if row.get("which") == "ours"]
    return max(found, default=None)


def _wrong(table: str, right: str) -> Callable[[Rows], float | None]:
    """How many rows of a table are not as they should be."""

    def value(rows: Rows) -> float | None:
        states = [row["state"] for row in rows if row["table"] == table]
        return sum(state != right for state in states) if states else None

    return value


def _format(name: str, column: str) -> Callable[[Rows], float | None]:
    return lambda rows: _pick(rows, column, table="formats", which=f"{name}, diffusion")


def _nvfp4_over_fp8(rows: Rows) -> float | None:
    column = "tokens_a_second"
    return _ratio(_format("nvfp4-weights", column)(rows), _format("fp8-dynamic", column)(rows))


def _at_least(target: float) -> Callable[[Any], bool]:
    return lambda value: value >= target


def _at_most(target: float) -> Callable[[Any], bool]:
    return lambda value: value <= target


SERVING = ("serving-ours", "serving-stock", "serving-tuned")
FIGURES = (
    Figure(
        "attention, statistics and noise of the Triton kernels, executed: wrong ones",
        "0",
        ("kernels",),
        _wrong("kernels", "right"),
        _at_most(0),
    ),
    Figure(
        "steps and attention as graphs: replays that differ from the eager call in a bit",
        "0",
        ("graphs",),
        _wrong("graphs", "equal"),
        _at_most(0),
    ),
    *(
        Figure(
            f"attention, {layer} layer, {_count(requests, 'request')} of {context} tokens: {peer} over ours",
            "",
            ("attention",),
            _attention(layer, requests, context, peer),
            form="{:.2f}",
        )
        for layer, requests, context in (
            ("sliding", 1, 1024),
            ("sliding", 8, 8192),
            ("full", 1, 1024),
            ("full", 1, 32768),
            ("full", 8, 8192),
        )
        for peer in (
            *("stock-triton", "stock-fa4", "cute", "cute-unsplit", "unsplit"),
            "rows-64" if layer == "sliding" else "keys-16",
        )
    ),
    Figure(
        'attention, `impl="cute"`: most that an entry differs from Triton\'s',
        "at most 0.02",
        ("attention",),
        lambda rows: max(
            (row["differs"] for row in rows if row.get("which", "").startswith("cute")),
            default=None,
        ),
        _at_most(0.02),
        "{:.1e}",
    ),
    *(
        Figure(
            f"sampling, {_count(canvases, 'canvas')}: stock over ours in a graph",
            "",
            ("sampler",),
            _sampler(canvases),
            form="{:.2f}",
        )
        for canvases in (1, 8, 32)
    ),
    *(
        Figure(
            f"sampling, one canvas, {setting}: over the same without",
            "",
            ("sampler",),
            _setting(setting),
            form="{:.2f}",
        )
        for setting in ("top_p", "top_k and top_p", "logprobs")
    ),
    *(
        Figure(
            f"sampling, {_count(canvases, 'canvas')}: one stream over two, graphs",
            "",
            ("sampler-variants",),
            _variant(canvases, "ours", "ours, two streams"),
            form="{:.2f}",
        )
        for canvases in (1, 2, 8)
    ),
    *(
        Figure(
            f"sampling, {_count(canvases, 'canvas')}, {share} of the rows settled: `skip_unlikely` false over true",
            "",
            ("sampler-variants",),
            _variant(
                canvases,
                f"ours, {share} of the rows settled",
                f"ours, skipping, {share} of the rows settled",
            ),
            form="{:.2f}",
        )
        for canvases in (1, 8)
        for share in ("0%", "50%", "90%", "100%")
    ),
    Figure(
        "peak memory of sampling, bytes a logit",
        "at most 1",
        ("sampler",),
        _bytes,
        _at_most(1),
        "{:.2f}",
    ),
    *(
        Figure(
            f"tokens a second at {_count(requests, 'request')}, over the better stock",
            f"at least {target}",
            SERVING,
            _throughput(requests),
            _at_least(target),
            "{:.2f}",
        )
        for requests, target in ((1, 1.1), (8, 2.0))
    ),
    *(
        Figure(
            f"median time to the first token at {_count(requests, 'request')}, over the better stock",
            "at most 1",
            SERVING,
            _first_token(requests),
            _at_most(1),
            "{:.2f}",
        )
        for requests in (1, 8)
    ),
    Figure(
        "a pass at 1 request, ms",
        "at most 6.5",
        ("serving-ours",),
        lambda rows: _pick(rows, "ms_a_pass", table="serving", side="ours", requests=1),
        _at_most(6.5),
        "{:.2f}",
    ),
    Figure(
        "FP8 at 1 request: share of what memory can read",
        "at least 0.95",
        ("format-fp8-dynamic",),
        _format("fp8-dynamic", "of_limit"),
        _at_least(0.95),
        "{:.2f}",
    ),
    Figure(
        "NVFP4, weights only, over FP8, tokens a second",
        "at least 1.3",
        ("format-fp8-dynamic", "format-nvfp4-weights"),
        _nvfp4_over_fp8,
        _at_least(1.3),
        "{:.2f}",
    ),
    *(
        Figure(
            f"tuned experts at {rows} rows, FP8: time before over after",
            "",
            ("experts",),
            lambda found, rows=rows: _ratio(
                _pick(found, "us_before", table="experts", dtype="fp8", rows=rows),
                _pick(found, "us_tuned", table="experts", dtype="fp8", rows=rows),
            ),
            form="{:.2f}",
        )
        for rows in (256, 2048)
    ),
)


def place(origin: Origin) -> str:
    """Where results come from, in a line."""
    machine = origin.machine
    chip = machine["gpu"] or "CPU"
    versions = [f"{name} {machine[name]}" for name in ("torch", "triton", "vllm") if machine[name]]
    driver = [f"driver {machine['driver']}"] if machine["driver"] else []
    return ", ".join([chip, *driver, *versions, f"commit {origin.commit[:12]}"])


def table(rows: Rows) -> Iterator[str]:
    """Rows of one kind as a Markdown table."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "table"))
    yield f"| {' | '.join(column.replace('_', ' ') for column in columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        cells = [row.get(column) for column in columns]
        yield f"| {' | '.join(_cell(value) for value in cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (f"{value:.3g}" if isinstance(value, float) else str(value)).replace("|", "\\|")


def section(origin: Origin, found: Found) -> str:
    """All that one run found, and what it did not run."""
    started = min(result.started for result in found.values())
    lines = [f"### {started[:10]}, {place(origin)}", ""]
    if origin.toy or origin.machine["gpu"] is None:
        lines += [
            "A rehearsal without a GPU: it shows that the campaign runs, and nothing else.",
            "",
        ]
    lines += ["| experiment | state | seconds | why |", "|---|---|---|---|"]
    order = [e.name for e in EXPERIMENTS]
    for name in sorted(found, key=lambda n: order.index(n) if n in order else len(order)):
        result = found[name]
        state = "interrupted" if result.state == "running" else result.state
        lines.append(f"| {name} | {state} | {result.seconds} | {_cell(result.reason)} |")
    missing = [name for name in order if name not in found]
    lines += [f"| {name} | not run | | nobody asked for it |" for name in missing]
    for name in sorted(found, key=lambda n: order.index(n) if n in order else len(order)):
        kinds = dict.fromkeys(row["table"] for row in found[name].rows)
        for kind in kinds:
            lines += ["", f"`{name}`, {kind}: `{found[name].command}`", ""]
            lines += table([row for row in found[name].rows if row["table"] == kind])
    return "\n".join(lines) + "\n"


def open_figures(groups: list[tuple[Origin, Found]]) -> str:
    """Every figure with what was measured of it, each where it was measured."""
    lines = ["", "| figure | target | experiment | measured |", "|---|---|---|---|"]
    for figure in FIGURES:
        measured = [
            f"{value} ({origin.machine['gpu']}, {origin.commit[:7]})"
            for origin, found in groups
            if (value := figure.measured(found)) is not None
        ]
        names = ", ".join(f"`{name}`" for name in figure.experiments)
        said = "; ".join(measured) or "open"
        lines.append(f"| {figure.text} | {figure.target or 'none'} | {names} | {said} |")
    lines.append("")
    for origin, found in groups:
        lines += [section(origin, found)]
    return "\n".join([*lines, ""])


# The rows of docs/operate/what-was-run.md, and the experiments that each stands for.
PLACES = (
    ("Triton kernels of attention and of the sampler, executed", ("kernels",)),
    ("CUDA graphs, captured and replayed", ("graphs",)),
    ("the 26B shape with random weights, FP8, served", ("serving-ours",)),
    ("the same in NVFP4", ("format-nvfp4-weights",)),
)


def where_it_ran(groups: list[tuple[Origin, Found]]) -> str:
    """The table of GPUs in docs/operate/what-was-run.md."""
    lines = ["", "| on an NVIDIA GPU | where | state |", "|---|---|---|"]
    for what, names in PLACES:
        runs = [
            (place(origin), found[name])
            for origin, found in groups
            for name in names
            if name in found and found[name].state in results.SETTLED
        ]
        if not runs:
            lines.append(f"| {what} | | not yet |")
        for where, result in runs:
            state = "runs" if result.state == "done" else f"{result.state}: {_cell(result.reason)}"
            lines.append(f"| {what} | {where} | {state} |")
    return "\n".join([*lines, "", ""])


def publishable(groups: list[tuple[Origin, Found]]) -> list[tuple[Origin, Found]]:
    """Those that say something about a GPU."""
    return [(o, found) for o, found in groups if o.machine["gpu"] is not None and not o.toy]


# What is written where.
DOCUMENTS: dict[str, Callable[[list[tuple[Origin, Found]]], str]] = {
    "benchmarks/RESULTS.md": open_figures,
    "docs/operate/what-was-run.md": where_it_ran,
}


def kept() -> list[Path]:
    """The folders of results in the checkout."""
    return sorted(path for path in results.RESULTS.glob("*") if path.is_dir())


def with_tables(name: str, page: str, groups: list[tuple[Origin, Found]]) -> str:
    """A document with its generated part anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{name} has no part between {BEGIN.strip()} and {END.strip()}")
    return before + begin + DOCUMENTS[name](publishable(groups)) + end + after


def run(options: argparse.Namespace) -> int:
    """Print the tables, or write them into the documents."""
    missing = [str(folder) for folder in options.folders if not folder.is_dir()]
    if missing:
        print(f"no such folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    try:
        groups = results.read_all(options.folders or kept())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.write:
        for origin, found in groups:
            print(section(origin, found))
        print(open_figures(publishable(groups)).partition("\n### ")[0])
        return 0
    if options.folders:
        print(
            f"--write takes what is kept in {results.RESULTS}; copy a folder there first",
            file=sys.stderr,
        )
        return 2
    for origin, _ in groups:
        if origin.toy or origin.machine["gpu"] is None:
            print(f"left out, since no GPU took part: {place(origin)}", file=sys.stderr)
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(
            with_tables(name, path.read_text(encoding="utf-8"), groups), encoding="utf-8"
        )
        print(path)
    return 0
