"""What the campaign found, as one table, and what it leaves open, as another; and the same into
gpu-figures.md.

What every experiment measured in detail is in its result's file. Results of two commits or machines
never meet in one figure.
"""

import argparse
from collections.abc import Sequence

import results
from experiments import EXPERIMENTS, Experiment
from figures import FIGURES, Figure, listed
from records import DOCUMENT, markdown, write_part
from results import Facts, Found, Run

# A server's own log names its attention; where it does not, no target of a ratio is met.
UNNAMED = Facts(stock_attention="attention not named")


def measured(runs: Sequence[Run]) -> str:
    """Return every figure that a GPU measured, the newest first: of each kind of GPU the newest run
    that has it.
    """
    rows, known = [], set()
    for run in _newest_first(runs):
        gpu = run.origin.machine["gpu"]
        where = f"{_model(gpu)}, {run.started[:10]}, {run.origin.commit[:7]}"
        for i, figure in enumerate(FIGURES):
            numbers = figure.measured(run.found)
            is_outdated = figure.experiments in run.facts.outdated
            if numbers is None or (i, gpu) in known or is_outdated:
                continue
            known.add((i, gpu))
            attention = _attention(figure, run)
            # A target of a ratio to another back end is in the table of what is open.
            verdict = figure.verdict(numbers, attention)
            value = "; ".join(part for part in (listed(numbers), verdict) if part)
            peer = f"stock, {attention}" if figure.sides else figure.peer
            rows.append([where, figure.text, value, figure.expected, peer])
        for fact in run.facts.figures:
            rest = [fact.get("predicted"), fact.get("peer")]
            rows.append([where, fact["text"], fact["measured"], *rest])
    heads = ["GPU, date, commit", "figure", "measured", "predicted (H100), estimated (H200)"]
    return markdown([*heads, "peer, its attention"], rows)


def decision(experiment: Experiment, found: Found) -> list[str]:
    """Return what an experiment decides: a line for each of its figures that is known, and one in
    words.

    Args:
        experiment: One that has run.
        found: Results of its run.
    """
    lines, verdicts = [], []
    for figure in FIGURES:
        # A figure of several experiments is known when the last has run.
        if experiment.name != figure.experiments.split()[-1]:
            continue
        numbers = figure.measured(found)
        verdict = None
        if numbers is not None:
            attention = _attention(figure, Run(found[experiment.name].origin, found, UNNAMED))
            verdict = figure.verdict(numbers, attention)
            with_peer = f"{figure.text}, {attention}" if attention else figure.text
            value = "; ".join(part for part in (listed(numbers), verdict) if part)
            lines.append(f"{with_peer}: {value}")
        if figure.target:
            verdicts.append(verdict)
    if any(verdict and "missed" in verdict for verdict in verdicts):
        return [*lines, f"decided: {experiment.otherwise}"]
    if None in verdicts:
        return [*lines, f"not decided, since a target is open: {experiment.decides}"]
    return [*lines, f"{'decided' if verdicts else 'tells'}: {experiment.decides}"]


def still_open(runs: Sequence[Run]) -> str:
    """Return one row for each experiment whose figures or targets are open, in the campaign's
    order.
    """
    answered = {fact.get("experiment") for run in runs for fact in run.facts.figures}
    rows = []
    for experiment in EXPERIMENTS:
        figures = [figure for figure in FIGURES if experiment.name in figure.experiments.split()]
        left = [figure for figure in figures if not _is_answered(figure, runs)]
        ran = [(run, run.found[experiment.name]) for run in runs if experiment.name in run.found]
        if experiment.name in answered or (not left and (figures or ran)):
            continue
        # A target of several experiments stands beside the last, which completes it.
        targets = [
            f"{figure.text}: {figure.target}"
            for figure in left
            if figure.target and figure.experiments.split()[-1] == experiment.name
        ]
        states = [
            f"{result.state}, {_model(run.origin.machine['gpu'])}, {run.origin.commit[:7]}"
            for run, result in ran
        ]
        rows.append(
            [f"`{experiment.name}`", experiment.answers, "; ".join(targets), "; ".join(states)]
        )
    return markdown(["experiment", "what it answers", "targets", "ran"], rows)


def _newest_first(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: run.started, reverse=True)


def _model(gpu: str) -> str:
    """Return a GPU's name without its maker and its memory: "H100"."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def _attention(figure: Figure, run: Run) -> str:
    return figure.attention(run.found, run.facts.stock_attention) if figure.sides else ""


def _is_answered(figure: Figure, runs: Sequence[Run]) -> bool:
    """Return whether a run has all values of a figure, and a verdict where there is a target."""
    for run in runs:
        numbers = figure.measured(run.found)
        if numbers is None or None in numbers:
            continue
        if figure.verdict(numbers, _attention(figure, run)) is not None:
            return True
    return False


def run(options: argparse.Namespace) -> int:
    """Print the tables, or write them into the document."""
    kept = sorted(path for path in results.RESULTS.glob("*") if path.is_dir())
    runs = results.read_all(options.folders or kept)
    for name, text in (("measured", measured(runs)), ("open", still_open(runs))):
        if options.write:
            write_part(name, text)
        else:
            print(f"{name}\n\n{text}")
    if options.write:
        print(DOCUMENT)
    return 0
