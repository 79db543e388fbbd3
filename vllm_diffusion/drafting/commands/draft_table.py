"""Tables of what :mod:`vllm_diffusion.drafting.commands.draft_runs` measured."""

from collections.abc import Callable, Sequence
from statistics import median

from vllm_diffusion.cli.console import table
from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.commands.draft_runs import (
    Plan,
    Result,
    Round,
    of_the_card,
    verifications,
)

_NOT_KNOWN = "-"
# A diffusion model's own way, and all of its ways by turns; its others verify each token.
DIFFUSION, MIXED = "diffusion", "mixed"


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


def processor_ratios(rounds: Sequence[Round], baseline: Sequence[Round]) -> list[float]:
    """Compute :func:`ratios` of processor seconds; nothing where a round is too short for their
    clock.
    """
    if not all(each.processor_seconds for each in (*rounds, *baseline)):
        return []
    return ratios(rounds, baseline, lambda r: r.processor_seconds)


def _titled(title: str, rows: Sequence[Sequence[str]]) -> str:
    return f"{title}\n{table(rows, indent='  ', figures=True)}"


def _speeds(concurrency: int, whole: Sequence[Result], baseline: Result, plan: Plan) -> str:
    rows = [_speed(each, baseline, concurrency) for each in whole]
    if any(each.contender.card for each in whole):
        for row, each in zip(rows, whole, strict=True):
            share = of_the_card(each, concurrency)
            row["of the card's"] = f"{share:.2f}" if share is not None else _NOT_KNOWN
    same = [_same_tokens(each, baseline, plan) for each in whole]
    if any(each is not None for each in same):
        for row, is_same in zip(rows, same, strict=True):
            row["same tokens"] = {True: "yes", False: "NO", None: _NOT_KNOWN}[is_same]
    return _titled(
        f"{concurrency} at a time", [list(rows[0]), *(list(row.values()) for row in rows)]
    )


def _same_tokens(result: Result, baseline: Result, plan: Plan) -> bool | None:
    """Return whether greedy answers are the same; ``None`` where it is not promised: a canvas has
    another law.
    """
    has_canvases = {DIFFUSION, MIXED} & {result.contender.way, baseline.contender.way}
    if plan.temperature or baseline.failure or has_canvases:
        return None
    return result.answers_as(baseline)


def _speed(result: Result, baseline: Result, concurrency: int) -> dict[str, str]:
    """Return one row, by the heads of its columns."""
    rounds, others = result.of(concurrency), baseline.of(concurrency)
    times = [] if baseline.failure else ratios(rounds, others)
    used = [] if baseline.failure else processor_ratios(rounds, others)
    counts = [each.counted for each in rounds]
    # Mean over all requests.
    first_token = sum(n.first_token_seconds for n in counts) / sum(n.requests for n in counts)
    row = {
        "way" if result.contender.way else "draft": result.contender.name,
        "tokens/s": f"{median(rates(rounds)):.1f}",
        "ratio": f"{median(times):.2f}" if times else _NOT_KNOWN,
        "from..to": f"{min(times):.2f}..{max(times):.2f}" if times else _NOT_KNOWN,
        "processor": f"{median(used):.2f}" if used else _NOT_KNOWN,
        "first token ms": f"{1000 * first_token:.1f}",
    }
    verified = verifications(rounds)
    if not result.contender.way:
        return row | {"tokens/verification": _tokens(verified)}
    tokens = sum(n.tokens for n in counts)
    return row | {
        "kept/draft": f"{verified.tokens - 1:.2f}" if verified.number else _NOT_KNOWN,
        "passes/token": f"{sum(n.passes for n in counts) / tokens:.2f}",
        "rows/token": f"{sum(n.rows for n in counts) / tokens:.2f}",
    }


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
    names = [each.contender.name for each in drafted]
    shares = [verifications(each.rounds).by_position for each in drafted]
    tasks = [
        [_tokens(verifications(each.of(task=task))) for task in plan.tasks] for each in drafted
    ]
    most = max(map(len, shares))
    return [
        _titled(
            "Percent of verifications that kept the token at a position",
            [
                ["position", *map(str, range(1, most + 1))],
                *(
                    [name, *(f"{100 * share:.0f}" for share in kept)]
                    for name, kept in zip(names, shares, strict=True)
                ),
            ],
        ),
        _titled(
            "Tokens a verification by task",
            [
                ["task", *plan.tasks],
                *([name, *row] for name, row in zip(names, tasks, strict=True)),
            ],
        ),
    ]
