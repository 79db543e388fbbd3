"""Races of servers that have one target and different drafts, measured by the servers' own
counters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING

import psutil

from vllm_diffusion.cli.answer import AnswerError
from vllm_diffusion.cli.client import (
    ANSWERED,
    ServerError,
    metrics_after,
    openai_client,
    read_metrics,
    totals,
)
from vllm_diffusion.cli.console import say
from vllm_diffusion.cli.server import Server, vllm_serve
from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.commands.contenders import EXACT, MIXED, Contender
from vllm_diffusion.drafting.commands.prompt_sets import Prompt, answer

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

MODEL_NAME = "target"
# Each round asks the same again.
_OPTIONS = ("--served-model-name", MODEL_NAME, "--no-enable-prefix-caching")
# pydantic names the field, and what is wrong with it, in the two lines after an error.
_ERROR = r"(?:\w+\.)*\w*(?:Error|Exception): (?:\d+ validation errors? for .*\n.*\n.*|\S.*)"
# Why a server did not start: as this package reports it, else vLLM's parser, else the first error,
# which is the cause of those after it.
_REASONS = (r"vllm-diffusion: .*", r"vllm[\w. ]*: error: \S.*", _ERROR)
# Counters of a draft model, and of ``linear_spec``: a server has one of the two.
_VERIFIED = ("vllm:spec_decode_num_drafts_total", "vllm_diffusion:verifications_total")
_KEPT = (
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm_diffusion:kept_tokens_per_position_total",
)
_PASSES = "vllm_diffusion:passes_total"


@dataclass(frozen=True)
class Growth:
    """Growth of a server's counters while it answered.

    Attributes:
        requests: Answered requests.
        tokens: Tokens of the answers.
        first_token_seconds: Seconds from each request to its first token, summed.
        verifications: Verified drafts.
        passes: Passes of requests, those over prompts among them. A server that vLLM alone serves
            does not count them: one for each token, which holds without a draft.
        rows: Rows of these passes but for the prompts', likewise.
    """

    requests: float = 0.0
    tokens: float = 0.0
    first_token_seconds: float = 0.0
    verifications: Verifications = Verifications()
    passes: float = 0.0
    rows: float = 0.0

    @classmethod
    def between(cls, before: Sequence[Sample], after: Sequence[Sample]) -> Growth:
        """Subtract one look at the counters from a later one."""
        was, now = totals(before), totals(after)
        kept_before, kept = (
            totals((each for each in samples if each.name in _KEPT), "position")
            for samples in (before, after)
        )
        places = sorted(kept, key=int)

        def grown(*names: str) -> float:
            return sum(now.get(name, 0.0) - was.get(name, 0.0) for name in names)

        requests, tokens = grown(ANSWERED), grown("vllm:generation_tokens_total")
        # The pass over the prompt gives the first token, and the last one is in no pass.
        passes, rows = tokens, tokens - requests
        if _PASSES in now:
            passes = grown(_PASSES)
            rows = grown("vllm_diffusion:encode_rows_total", "vllm_diffusion:canvas_rows_total")
            rows -= grown("vllm:prompt_tokens_total")
        return cls(
            requests,
            tokens,
            grown("vllm:time_to_first_token_seconds_sum"),
            Verifications(
                int(grown(*_VERIFIED)),
                tuple(int(kept[at] - kept_before.get(at, 0.0)) for at in places),
            ),
            passes,
            rows,
        )


@dataclass(frozen=True)
class Round:
    """The prompts of one task, answered once.

    Attributes:
        seconds: Seconds from the first request to the last answer.
        processor_seconds: Those of the server's processes, meanwhile: what else a machine does is
            not in it.
        answers: Token ids of every answer, in the order of the prompts.
    """

    task: str
    concurrency: int
    index: int
    seconds: float
    processor_seconds: float
    counted: Growth
    answers: tuple[tuple[int, ...], ...]


@dataclass
class Result:
    """Measurements of one contender.

    Attributes:
        failure: Why it has no figures; empty if it has.
    """

    contender: Contender
    rounds: list[Round] = field(default_factory=list)
    failure: str = ""

    def of(self, concurrency: int | None = None, task: str | None = None) -> list[Round]:
        """Return the rounds with so many requests at a time, and of one task; of all by default."""
        return [
            each
            for each in self.rounds
            if concurrency in (None, each.concurrency) and task in (None, each.task)
        ]

    def answers_as(self, other: Result) -> bool:
        """Return whether every answer is the same, token by token."""
        return [r.answers for r in self.rounds] == [r.answers for r in other.rounds]


def verifications(rounds: Iterable[Round]) -> Verifications:
    """Sum the verifications of rounds."""
    return sum((each.counted.verifications for each in rounds), Verifications())


def of_the_card(result: Result, concurrency: int | None = None) -> float | None:
    """Return the tokens per verification as a share of the card's lowest figure; ``None`` without
    a card or a verification.
    """
    verified = verifications(result.of(concurrency))
    card = result.contender.card
    return verified.tokens / card if card and verified.number else None


@dataclass(frozen=True)
class Plan:
    """Requests that every contender gets.

    Attributes:
        concurrencies: Requests at a time, one after another.
        num_rounds: Rounds that count; one more before them is for what is compiled and cached.
        max_tokens: Longest answer.
        temperature: 0 for the likeliest tokens.
    """

    tasks: Mapping[str, Sequence[Prompt]]
    concurrencies: tuple[int, ...]
    num_rounds: int
    max_tokens: int
    temperature: float


def race(
    target: str,
    contenders: Sequence[Contender],
    plan: Plan,
    *,
    serve_options: Sequence[str] = (),
    one_at_a_time: bool,
    verbose: bool = False,
) -> list[Result]:
    """Serve the target with each contender, and ask all of them the same.

    Side by side, each task goes to one server after another before the next task begins, so that a
    machine that is busy for a while is so for all of them. One server at a time, it is not.

    Args:
        target: What ``vllm serve`` takes.
        contenders: The first is the baseline.
        plan: Requests that each gets.
        serve_options: Options of every server.
        one_at_a_time: Whether a server is stopped before the next one starts.
        verbose: Whether what the servers print is printed, as it comes.

    Returns:
        One for each contender, in their order; one that failed states why, and the others go on.
    """
    results = [Result(contender) for contender in contenders]
    for group in [[each] for each in results] if one_at_a_time else [results]:
        with ExitStack() as stack:
            running: list[tuple[Result, Server]] = []
            for result in group:
                server = Server(
                    vllm_serve(target, *_OPTIONS, *serve_options, *result.contender.options),
                    report=say,
                    timeout=1800.0,
                    environment={"VLLM_NO_USAGE_STATS": "1"},
                    verbose=verbose,
                )
                say(f"Starting a server: {result.contender.name}")
                try:
                    running.append((result, stack.enter_context(server)))
                except ServerError as error:
                    log = server.log_path.read_text(encoding="utf-8", errors="replace")
                    result.failure = f"{refusal(log) or error} (log: {server.log_path})"
                    say(f"         {result.failure}")
            _ask_all(running, plan)
    return results


def _ask_all(running: Sequence[tuple[Result, Server]], plan: Plan) -> None:
    for index in range(plan.num_rounds + 1):
        for concurrency in plan.concurrencies:
            counted = "" if index else " (not counted)"
            say(f"Round {index} of {plan.num_rounds}, {concurrency} at a time{counted}")
            for task in plan.tasks:
                for result, server in running:
                    if result.failure:
                        continue
                    try:
                        answered = _ask(server, result.contender, task, plan, concurrency, index)
                    except (AnswerError, ServerError) as error:
                        result.failure = f"{task}: {error}"
                        say(f"         {result.contender.name}: {result.failure}")
                        continue
                    if index:
                        result.rounds.append(answered)


def _ask(
    server: Server, contender: Contender, task: str, plan: Plan, concurrency: int, index: int
) -> Round:
    client = openai_client(server.url, server.api_key)
    options = {
        "model": MODEL_NAME,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
    }
    before = read_metrics(server.url)
    used = processor_seconds(server.processes())
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        # Where all ways are mixed, requests choose none and each of the others in turn. The pool
        # reads its arguments ahead: as many as there are prompts.
        chosen = ("", *EXACT) if contender.way == MIXED else ("",)
        turns = islice(cycle(chosen), len(plan.tasks[task]))
        bodies = [{"vllm_xargs": {"diffusion_rule": way}} if way else {} for way in turns]
        answers = tuple(
            pool.map(lambda each, own: answer(client, each, options, own), plan.tasks[task], bodies)
        )
    seconds = time.perf_counter() - start
    used = processor_seconds(server.processes()) - used
    expected = totals(before).get(ANSWERED, 0.0) + len(answers)
    growth = Growth.between(before, metrics_after(server.url, expected, seconds=30.0))
    if growth.requests < len(answers):
        raise ServerError(
            f"The server counts {growth.requests:.0f} of {len(answers)} requests on /metrics."
        )
    return Round(task, concurrency, index, seconds, used, growth, answers)


def refusal(log: str) -> str:
    """Return the reason in a server's log for which it did not start; empty if nothing does."""
    log = re.sub(r"^\(\w+ pid=\d+\)\s*", "", log, flags=re.MULTILINE)
    matches = (re.search(f"^{reason}", log, re.MULTILINE) for reason in _REASONS)
    return next((" ".join(match[0].split()) for match in matches if match), "")


def processor_seconds(processes: Sequence[int]) -> float:
    """Sum the seconds of all cores that processes have used; those that have ended count
    nothing.
    """
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = psutil.Process(process).cpu_times()
            total += times.user + times.system
    return total
