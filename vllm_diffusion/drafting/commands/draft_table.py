"""Figures of :mod:`vllm_diffusion.drafting.commands.draft_runs`, for programs and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import median
from typing import Any

from vllm_diffusion.cli.console import table
from vllm_diffusion.drafting.commands.draft_runs import Plan, Result, Round, verifications

# What was measured of one contender, in all or with so many requests at a time.
Figures = dict[str, Any]
_MIB = 2**20
_NOT_KNOWN = "-"
# Rule of denoised canvases, as `bench-ways` calls a model's own; the others verify each token.
DIFFUSION = "diffusion"


def as_json(results: Sequence[Result], plan: Plan) -> list[Figures]:
    """Compute every figure, by requests at a time and by task, and every round's.

    Args:
        results: Of :func:`race`, the baseline first.
        plan: What was asked.
    """
    baseline = results[0]
    return [
        {
            **asdict(result.contender),
            "failure": result.failure or None,
            "resident_bytes": result.resident_bytes or None,
            "device_bytes": result.device_bytes,
            **_acceptance(result.rounds),
            "tasks": {
                task: _acceptance([each for each in result.rounds if each.task == task])
                for task in plan.tasks()
            },
            "loads": [
                _load(result, baseline, plan, concurrency)
                for concurrency in plan.concurrencies
                if result.of(concurrency)
            ],
        }
        for result in results
    ]


def _load(result: Result, baseline: Result, plan: Plan, concurrency: int) -> Figures:
    is_whole = not result.failure and not baseline.failure
    rounds, others = result.of(concurrency), baseline.of(concurrency)
    tasks = {}
    for task in plan.tasks():
        theirs = result.of(concurrency, task)
        tasks[task] = {
            "ratio": median(ratios(theirs, baseline.of(concurrency, task))) if is_whole else None,
            "processor_seconds": [each.processor_seconds for each in theirs],
            **_acceptance(theirs),
        }
    return {
        "concurrency": concurrency,
        "tokens_per_second": tokens_per_second(rounds),
        "ratios": ratios(rounds, others) if is_whole else None,
        "processor_ratios": processor_ratios(rounds, others) if is_whole else None,
        # Of all requests, the mean.
        "first_token_seconds": sum(each.counted.first_token_seconds for each in rounds)
        / max(sum(each.counted.requests for each in rounds), 1),
        **_per_token(rounds),
        "same_tokens": result.says_as(baseline)
        if plan.temperature == 0 and is_whole and _has_one_law(result, baseline)
        else None,
        **_acceptance(rounds),
        "tasks": tasks,
    }


def _has_one_law(result: Result, baseline: Result) -> bool:
    """Return whether greedy answers of both are promised to be the same; a canvas's are another law's."""
    return DIFFUSION not in (result.contender.rule, baseline.contender.rule)


def _per_token(rounds: Sequence[Round]) -> Figures:
    tokens = max(sum(each.counted.tokens for each in rounds), 1)
    return {
        "passes_per_token": sum(each.counted.passes for each in rounds) / tokens,
        "rows_per_token": sum(each.counted.rows for each in rounds) / tokens,
    }


def _acceptance(rounds: Sequence[Round]) -> Figures:
    verified = verifications(rounds)
    return {
        "seconds": sum(each.seconds for each in rounds),
        "tokens": sum(each.counted.tokens for each in rounds),
        "verifications": verified.number,
        "tokens_per_verification": verified.tokens,
        "accepted_lengths": verified.lengths,
        "acceptance_by_position": verified.by_position,
    }


def tokens_per_second(
    rounds: Sequence[Round], seconds: Callable[[Round], float] = lambda r: r.seconds
) -> list[float]:
    """Compute the tokens a second of each round, over its tasks."""
    rates = []
    for _, group in groupby(sorted(rounds, key=lambda r: r.index), key=lambda r: r.index):
        theirs = list(group)
        rates.append(sum(r.counted.tokens for r in theirs) / sum(map(seconds, theirs)))
    return rates


def ratios(
    rounds: Sequence[Round],
    baseline: Sequence[Round],
    seconds: Callable[[Round], float] = lambda r: r.seconds,
) -> list[float]:
    """Divide each round's tokens a second by the baseline's in the same round."""
    pairs = zip(
        tokens_per_second(rounds, seconds), tokens_per_second(baseline, seconds), strict=True
    )
    return [ours / theirs for ours, theirs in pairs]


def processor_ratios(rounds: Sequence[Round], baseline: Sequence[Round]) -> list[float]:
    """Compute :func:`ratios` of processor seconds; nothing where a round is too short for their clock."""
    if not all(each.processor_seconds for each in (*rounds, *baseline)):
        return []
    return ratios(rounds, baseline, lambda r: r.processor_seconds)


def tables(contenders: Sequence[Figures]) -> str:
    """Write all tables, and below them the notes and which draft pays.

    Args:
        contenders: Of :func:`as_json`, the baseline first. One that failed is in no table; its reason
            is in the notes.
    """
    whole = [each for each in contenders if not each["failure"]]
    by_load: dict[int, list[tuple[Figures, Figures]]] = {}
    for each in whole:
        for load in each["loads"]:
            by_load.setdefault(load["concurrency"], []).append((each, load))
    parts = [_speeds(*each) for each in by_load.items()]
    parts += [_ratios_by_task(*each) for each in by_load.items() if not contenders[0]["failure"]]
    parts += _verified([each for each in whole if each["verifications"]])
    notes = [f"{each['name']}: {each['note']}" for each in contenders if each["note"]]
    notes += [
        f"{each['name']}: no figures. {each['failure']}" for each in contenders if each["failure"]
    ]
    if not contenders[0]["failure"]:
        notes += [line for each in by_load.items() for line in _verdicts(*each)]
    return "\n\n".join(part for part in (*parts, "\n".join(notes)) if part)


def _titled(title: str, rows: Sequence[Sequence[str]]) -> str:
    return f"{title}\n{table(rows, indent='  ', figures=True)}"


def _requests(concurrency: int) -> str:
    return "1 request" if concurrency == 1 else f"{concurrency} requests"


def _speeds(concurrency: int, found: Sequence[tuple[Figures, Figures]]) -> str:
    rows = [_speed(*each) for each in found]
    if all(load["same_tokens"] is None for _, load in found):
        for row in rows:
            del row["same tokens"]
    title = f"{_requests(concurrency)} at a time"
    return _titled(title, [list(rows[0]), *(list(row.values()) for row in rows)])


def _speed(contender: Figures, load: Figures) -> dict[str, str]:
    """Return one row, by the heads of its columns."""
    times, used = load["ratios"], load["processor_ratios"]
    resident, on_gpus = contender["resident_bytes"], contender["device_bytes"]
    return {
        "way" if contender["rule"] else "draft": contender["name"],
        "tokens/s": f"{median(load['tokens_per_second']):.1f}",
        "ratio": f"{median(times):.2f}" if times else _NOT_KNOWN,
        "from..to": f"{min(times):.2f}..{max(times):.2f}" if times else _NOT_KNOWN,
        "processor": f"{median(used):.2f}" if used else _NOT_KNOWN,
        "first token ms": f"{1000 * load['first_token_seconds']:.1f}",
        "memory MiB": f"{resident / _MIB:.0f}" if resident else _NOT_KNOWN,
        "GPU MiB": _NOT_KNOWN
        if on_gpus is None
        else f"{on_gpus / _MIB:.0f}"
        if on_gpus
        else "no GPU",
        **(_work(load) if contender["rule"] else {"tokens/verification": _tokens(load)}),
        "same tokens": {True: "yes", False: "NO", None: _NOT_KNOWN}[load["same_tokens"]],
    }


def _work(load: Figures) -> dict[str, str]:
    kept = load["tokens_per_verification"] - 1
    return {
        "kept/draft": f"{kept:.2f}" if load["verifications"] else _NOT_KNOWN,
        "passes/token": f"{load['passes_per_token']:.2f}",
        "rows/token": f"{load['rows_per_token']:.2f}",
    }


def _tokens(verified: Figures) -> str:
    tokens: float = verified["tokens_per_verification"]
    return f"{tokens:.2f}" if verified["verifications"] else _NOT_KNOWN


def _ratios_by_task(concurrency: int, found: Sequence[tuple[Figures, Figures]]) -> str:
    (first, baseline), *others = found
    if not others or len(baseline["tasks"]) == 1:
        return ""
    rows = [
        [each["name"], *(f"{task['ratio']:.2f}" for task in load["tasks"].values())]
        for each, load in others
    ]
    title = f"Tokens a second as multiples of {first['name']}'s by task, "
    head = ["task", *baseline["tasks"]]
    return _titled(f"{title}{_requests(concurrency)} at a time", [head, *rows])


def _verified(drafted: Sequence[Figures]) -> list[str]:
    """Write what verifications kept, in all rounds."""
    if not drafted:
        return []
    positions: list[list[str]] = []
    lengths: list[list[str]] = []
    for each in drafted:
        shares = each["acceptance_by_position"]
        positions.append([each["name"], *(f"{100 * share:.0f}" for share in shares)])
        counts = [100 * count / each["verifications"] for count in each["accepted_lengths"]]
        lengths.append([each["name"], *(f"{count:.0f}" for count in counts)])
    tasks = [[each["name"], *map(_tokens, each["tasks"].values())] for each in drafted]
    most = max(map(len, positions))
    kept = max(map(len, lengths)) - 1
    return [
        _titled(
            "Percent of verifications that kept the token at a position",
            [["position", *map(str, range(1, most))], *positions],
        ),
        _titled(
            "Percent of verifications that kept as many tokens",
            [["tokens kept", *map(str, range(kept))], *lengths],
        ),
        _titled("Tokens a verification by task", [["task", *drafted[0]["tasks"]], *tasks]),
    ]


def _verdicts(concurrency: int, found: Sequence[tuple[Figures, Figures]]) -> Iterator[str]:
    """Say which draft is the fastest, and whether further passes are worth what they take."""
    rated = [(median(load["ratios"]), each) for each, load in found[1:]]
    if not rated:
        return
    ratio, best = max(rated, key=lambda each: each[0])
    kind = "other way" if best["rule"] else "draft"
    pays = "the fastest is" if ratio > 1 else f"no {kind} pays; the fastest is"
    yield (
        f"{concurrency} at a time: {pays} {best['name']}, with {ratio:.2f} times the tokens a second "
        f"of {found[0][0]['name']}."
    )
    once = next((ratio for ratio, each in rated if each["passes"] == 1), None)
    for ratio, each in rated:
        if once is not None and each["passes"] > 1:
            does = "pay" if ratio > once else "do not pay"
            yield (
                f"{concurrency} at a time: {each['passes']} passes {does}: {ratio / once:.2f} times "
                "the tokens a second of one."
            )
