"""Tables of what :mod:`vllm_diffusion.drafting.commands.draft_runs` measured."""

from collections.abc import Callable, Sequence
from statistics import median

from vllm_diffusion.cli.console import table
from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.commands.contenders import DIFFUSION, MIXED
from vllm_diffusion.drafting.commands.draft_runs import (
    Plan,
    Result,
    Round,
    of_the_card,
    verifications,
)

_NOT_KNOWN = "-"


def tables(results: Sequence[Result], plan: Plan) -> str:
    """Write all tables, and below them why a contender is in none.

    Args:
        results: Results of :func:`race`, the baseline first.
        plan: The measured contenders and prompts.
    """
    baseline, *others = results
    whole = [each for each in results if not each.failure]
    parts = [_speeds(n, whole, baseline, plan) for n in plan.concurrencies if whole]
    rivals = [each for each in others if not each.failure and not baseline.failure]
    if rivals and len(plan.tasks) > 1:
        parts += [_ratios_by_task(n, rivals, baseline, plan) for n in plan.concurrencies]
    parts += _verified([each for each in whole if verifications(each.rounds).number], plan)
    failures = [f"{r.contender.name}: no figures. {r.failure}" for r in results if r.failure]
    return "\n\n".join([*parts, *failures])


def rates(
    rounds: Sequence[Round], seconds: Callable[[Round], float] = lambda r: r.seconds
) -> list[float]:
    """Compute the tokens a second of each round, over its tasks."""
    groups: dict[int, list[Round]] = {}
    for each in rounds:
        groups.setdefault(each.index, []).append(each)
    return [
        sum(r.counted.tokens for r in group) / sum(map(seconds, group)) for group in groups.values()
    ]


def ratios(
    rounds: Sequence[Round],
    baseline: Sequence[Round],
    seconds: Callable[[Round], float] = lambda r: r.seconds,
) -> list[float]:
    """Divide each round's tokens a second by the baseline's in the same round."""
    pairs = zip(rates(rounds, seconds), rates(baseline, seconds), strict=True)
    return [ours / theirs for ours, theirs in pairs]


def _titled(title: str, rows: Sequence[Sequence[str]]) -> str:
    return f"{title}\n{table(rows, indent='  ', figures=True)}"


def _speeds(concurrency: int, whole: Sequence[Result], baseline: Result, plan: Plan) -> str:
    rows = [_speed(each, baseline, concurrency, plan) for each in whole]
    heads = [head for head in rows[0] if any(row[head] is not None for row in rows)]
    cells = ([row[head] or _NOT_KNOWN for head in heads] for row in rows)
    return _titled(f"{concurrency} at a time", [heads, *cells])


def _same_tokens(result: Result, baseline: Result, plan: Plan) -> str | None:
    """Return whether greedy answers are the same; ``None`` where it is not promised: a canvas has
    another law.
    """
    has_canvases = {DIFFUSION, MIXED} & {result.contender.way, baseline.contender.way}
    if plan.temperature or baseline.failure or has_canvases:
        return None
    return "yes" if result.answers_as(baseline) else "NO"


def _speed(result: Result, baseline: Result, concurrency: int, plan: Plan) -> dict[str, str | None]:
    """Return one row, by the heads of its columns; a column that has ``None`` in all rows is left
    out.
    """
    rounds, others = result.of(concurrency), baseline.of(concurrency)
    times = [] if baseline.failure else ratios(rounds, others)
    used: list[float] = []
    # A round may be too short for the clock of processors.
    if not baseline.failure and all(each.processor_seconds for each in (*rounds, *others)):
        used = ratios(rounds, others, lambda r: r.processor_seconds)
    counts = [each.counted for each in rounds]
    # Mean over all requests.
    first_token = sum(n.first_token_seconds for n in counts) / sum(n.requests for n in counts)
    row: dict[str, str | None] = {
        "way" if result.contender.way else "draft": result.contender.name,
        "tokens/s": f"{median(rates(rounds)):.1f}",
        "ratio": f"{median(times):.2f}" if times else _NOT_KNOWN,
        "from..to": f"{min(times):.2f}..{max(times):.2f}" if times else _NOT_KNOWN,
        "processor": f"{median(used):.2f}" if used else _NOT_KNOWN,
        "first token ms": f"{1000 * first_token:.1f}",
    }
    verified = verifications(rounds)
    if result.contender.way:
        tokens = sum(n.tokens for n in counts)
        row |= {
            "kept/draft": f"{verified.tokens - 1:.2f}" if verified.number else _NOT_KNOWN,
            "passes/token": f"{sum(n.passes for n in counts) / tokens:.2f}",
            "rows/token": f"{sum(n.rows for n in counts) / tokens:.2f}",
        }
    else:
        row["tokens/verification"] = _tokens(verified)
    share = of_the_card(result, concurrency)
    row["of the card's"] = None if share is None else f"{share:.2f}"
    row["same tokens"] = _same_tokens(result, baseline, plan)
    return row


def _tokens(verified: Verifications) -> str:
    return f"{verified.tokens:.2f}" if verified.number else _NOT_KNOWN


def _ratios_by_task(
    concurrency: int, rivals: Sequence[Result], baseline: Result, plan: Plan
) -> str:
    rows = []
    for each in rivals:
        pairs = (
            (each.of(concurrency, task), baseline.of(concurrency, task)) for task in plan.tasks
        )
        rows.append([each.contender.name, *(f"{median(ratios(*pair)):.2f}" for pair in pairs)])
    title = f"Tokens a second as multiples of {baseline.contender.name}'s by task, {concurrency} at a time"
    return _titled(title, [["task", *plan.tasks], *rows])


def _verified(drafted: Sequence[Result], plan: Plan) -> list[str]:
    """Write what verifications kept, in all rounds."""
    if not drafted:
        return []
    shares = [verifications(each.rounds).by_position for each in drafted]
    by_position = [["position", *map(str, range(1, max(map(len, shares)) + 1))]]
    by_task = [["task", *plan.tasks]]
    for each, kept in zip(drafted, shares, strict=True):
        name = each.contender.name
        by_position.append([name, *(f"{100 * share:.0f}" for share in kept)])
        by_task.append([name, *(_tokens(verifications(each.of(task=task))) for task in plan.tasks)])
    return [
        _titled("Percent of verifications that kept the token at a position", by_position),
        _titled("Tokens a verification by task", by_task),
    ]
