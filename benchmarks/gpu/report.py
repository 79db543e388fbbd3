"""What the campaign found, as one table; and the same into gpu-figures.md.

What every experiment measured in detail is in its result's file. Results of two commits or machines never meet
in one figure.
"""

from __future__ import annotations

import argparse

import results
from figures import FIGURES
from records import DOCUMENT, markdown, write_part
from results import Found, Origin


def ran(origin: Origin, found: Found) -> str:
    """What ran of one run, and how it ended."""
    in_order = sorted(found.values(), key=lambda result: result.started)
    heads = ["experiment", "state", "seconds", "why", "command"]
    rows = [
        [one.experiment, one.state, one.seconds, one.reason.replace("|", "\\|"), f"`{one.command}`"]
        for one in in_order
    ]
    return f"### {in_order[0].started[:10]}, {origin}\n\n{markdown(heads, rows)}"


def table(groups: list[tuple[Origin, Found]]) -> str:
    """Every figure with what GPUs measured of it, each where it was measured; and what ran."""
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
    return "\n".join([markdown(heads, rows), *(ran(*group) for group in groups)])


def run(options: argparse.Namespace) -> int:
    """Print the table, or write it into the document."""
    kept = sorted(path for path in results.RESULTS.glob("*") if path.is_dir())
    text = table(results.read_all(options.folders or kept))
    if options.write:
        write_part("campaign", text)
        print(DOCUMENT)
    else:
        print(text)
    return 0
