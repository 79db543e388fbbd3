"""What :mod:`vllm_diffusion.drafting.commands.draft_runs` measured, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from vllm_diffusion.drafting.commands.draft_runs import (
    Plan,
    Result,
    Round,
    first_token_seconds,
    processor_ratios,
    ratios,
    tokens_per_second,
    verifications,
)

_MIB = 2**20
_NOT_KNOWN = "-"


def tables(results: Sequence[Result], plan: Plan) -> str:
    """All of them, in lines; figures of servers that failed are their reasons.

    Args:
        results: Of :func:`race`, the baseline first.
        plan: What was asked.
    """
    parts = [_speeds(results, plan, concurrency) for concurrency in plan.concurrencies]
    drafted = [r for r in results if verifications(r.rounds).number]
    parts += [_ratios_by_task(results, plan, concurrency) for concurrency in plan.concurrencies]
    if drafted:
        parts += [_by_position(drafted), _lengths(drafted), _by_task(drafted, plan)]
    parts.append("\n".join([*_notes(results), *_verdicts(results, plan)]))
    return "\n\n".join(part for part in parts if part)


def _speeds(results: Sequence[Result], plan: Plan, concurrency: int) -> str:
    baseline = results[0]
    has_devices = any(result.device_bytes is not None for result in results)
    head = ["draft", "tokens/s", "ratio", "from..to", "processor", "first token ms", "memory MiB"]
    head += ["GPU MiB"] * has_devices + ["tokens/verification"]
    head += ["same tokens"] * (plan.temperature == 0)
    rows = []
    for result in results:
        rounds = result.of(concurrency)
        if result.failure or not rounds:
            rows.append([result.contender.name, "no figures: see below"])
            continue
        verified = verifications(rounds)
        others = [] if baseline.failure else baseline.of(concurrency)
        times = ratios(rounds, others) if others else []
        used = processor_ratios(rounds, others) if others else []
        row = [
            result.contender.name,
            f"{median(tokens_per_second(rounds)):.1f}",
            f"{median(times):.2f}" if times else _NOT_KNOWN,
            f"{min(times):.2f}..{max(times):.2f}" if times else _NOT_KNOWN,
            f"{median(used):.2f}" if used else _NOT_KNOWN,
            f"{1000 * first_token_seconds(rounds):.1f}",
            f"{result.resident_bytes / _MIB:.0f}" if result.resident_bytes else _NOT_KNOWN,
        ]
        if has_devices:
            on_devices = result.device_bytes
            row.append(_NOT_KNOWN if on_devices is None else f"{on_devices / _MIB:.0f}")
        row.append(f"{verified.tokens:.2f}" if verified.number else _NOT_KNOWN)
        if plan.temperature == 0:
            row.append("yes" if result.says_as(baseline) else "NO")
        rows.append(row)
    return f"{_requests(concurrency)} at a time\n{_aligned([head, *rows])}"


def _ratios_by_task(results: Sequence[Result], plan: Plan, concurrency: int) -> str:
    baseline, *others = results
    tasks = list(plan.tasks())
    rows = [
        [
            other.contender.name,
            *(f"{_median_ratio(other, baseline, concurrency, task):.2f}" for task in tasks),
        ]
        for other in others
        if not other.failure and not baseline.failure
    ]
    if not rows or len(tasks) == 1:
        return ""
    return (
        f"Tokens a second as multiples of no draft's by task, {_requests(concurrency)} at a time\n"
        f"{_aligned([['task', *tasks], *rows])}"
    )


def _median_ratio(
    result: Result, baseline: Result, concurrency: int, task: str | None = None
) -> float:
    return median(ratios(result.of(concurrency, task), baseline.of(concurrency, task)))


def _requests(concurrency: int) -> str:
    return "1 request" if concurrency == 1 else f"{concurrency} requests"


def _by_position(results: Sequence[Result]) -> str:
    shares = [verifications(result.rounds).by_position for result in results]
    head = ["position", *(str(at) for at in range(1, 1 + max(map(len, shares))))]
    rows = [_percentages(r.contender.name, each) for r, each in zip(results, shares, strict=True)]
    return f"Percent of verifications that kept the token at a position\n{_aligned([head, *rows])}"


def _lengths(results: Sequence[Result]) -> str:
    found = [verifications(result.rounds) for result in results]
    head = ["tokens kept", *(str(kept) for kept in range(max(len(each.lengths) for each in found)))]
    rows = [
        _percentages(r.contender.name, [count / each.number for count in each.lengths])
        for r, each in zip(results, found, strict=True)
    ]
    return f"Percent of verifications that kept as many tokens\n{_aligned([head, *rows])}"


def _by_task(results: Sequence[Result], plan: Plan) -> str:
    tasks = list(plan.tasks())
    rows = []
    for result in results:
        by_task = [verifications(_of_task(result, task)) for task in tasks]
        values = (f"{each.tokens:.2f}" if each.number else _NOT_KNOWN for each in by_task)
        rows.append([result.contender.name, *values])
    return f"Tokens a verification by task\n{_aligned([['task', *tasks], *rows])}"


def _of_task(result: Result, task: str) -> list[Round]:
    return [each for each in result.rounds if each.task == task]


def _percentages(name: str, shares: Sequence[float]) -> list[str]:
    return [name, *(f"{100 * share:.0f}" for share in shares)]


def _notes(results: Sequence[Result]) -> list[str]:
    noted = [r for r in results if r.contender.note]
    failed = [r for r in results if r.failure]
    return [
        *(f"{r.contender.name}: {r.contender.note}" for r in noted),
        *(f"{r.contender.name}: no figures. {r.failure}" for r in failed),
    ]


def _verdicts(results: Sequence[Result], plan: Plan) -> list[str]:
    """Which draft is the fastest, and whether further passes are worth what they take."""
    baseline, *others = results
    others = [each for each in others if not each.failure]
    lines: list[str] = []
    if baseline.failure or not others:
        return lines
    for concurrency in plan.concurrencies:
        ratio = {id(each): _median_ratio(each, baseline, concurrency) for each in others}
        best = max(others, key=lambda each: ratio[id(each)])
        pays = "the fastest is" if ratio[id(best)] > 1 else "no draft pays; the fastest is"
        lines.append(
            f"{concurrency} at a time: {pays} {best.contender.name}, with {ratio[id(best)]:.2f} times "
            "the tokens a second of none."
        )
        once = next((each for each in others if each.contender.passes == 1), None)
        for other in others:
            if once is not None and other.contender.passes > 1:
                gain = ratio[id(other)] / ratio[id(once)]
                does = "pay" if gain > 1 else "do not pay"
                lines.append(
                    f"{concurrency} at a time: {other.contender.passes} passes {does}: {gain:.2f} "
                    "times the tokens a second of one."
                )
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Names on the left, figures on the right; a row that is shorter ends where it does."""
    width = max(len(row[0]) for row in rows)
    widths = [
        max(len(row[column]) for row in rows if len(row) == len(rows[0]))
        for column in range(1, len(rows[0]))
    ]
    lines = []
    for row in rows:
        if len(row) < len(rows[0]) and not row[1][:1].isdigit():
            lines.append(f"  {row[0]:<{width}}  {row[1]}")
            continue
        cells = (f"{cell:>{size}}" for cell, size in zip(row[1:], widths, strict=False))
        lines.append("  ".join([f"  {row[0]:<{width}}", *cells]).rstrip())
    return "\n".join(lines)


def as_json(results: Sequence[Result], plan: Plan) -> list[dict[str, Any]]:
    """Every figure of :func:`tables`, by requests at a time and by task, and every round."""
    baseline = results[0]
    return [
        {
            **asdict(result.contender),
            "failure": result.failure or None,
            "resident_bytes": result.resident_bytes or None,
            "device_bytes": result.device_bytes,
            "loads": [
                _load(result, baseline, plan, concurrency)
                for concurrency in plan.concurrencies
                if result.of(concurrency)
            ],
        }
        for result in results
    ]


def _load(result: Result, baseline: Result, plan: Plan, concurrency: int) -> dict[str, Any]:
    rounds = result.of(concurrency)
    is_whole = not result.failure and not baseline.failure
    return {
        "concurrency": concurrency,
        "tokens_per_second": tokens_per_second(rounds),
        "ratios": ratios(rounds, baseline.of(concurrency)) if is_whole else None,
        "processor_ratios": processor_ratios(rounds, baseline.of(concurrency))
        if is_whole
        else None,
        "first_token_seconds": first_token_seconds(rounds),
        "same_tokens": result.says_as(baseline) if plan.temperature == 0 and is_whole else None,
        **_acceptance(rounds),
        "tasks": {
            task: {
                "ratio": _median_ratio(result, baseline, concurrency, task) if is_whole else None,
                "processor_seconds": [r.processor_seconds for r in result.of(concurrency, task)],
                **_acceptance(result.of(concurrency, task)),
            }
            for task in plan.tasks()
        },
    }


def _acceptance(rounds: Sequence[Round]) -> dict[str, Any]:
    verified = verifications(rounds)
    return {
        "seconds": sum(each.seconds for each in rounds),
        "tokens": sum(each.counted.tokens for each in rounds),
        "verifications": verified.number,
        "tokens_per_verification": verified.tokens,
        "accepted_lengths": verified.lengths,
        "acceptance_by_position": verified.by_position,
    }
