"""Races of servers that have one target and different drafts, measured by the servers' own counters."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vllm_diffusion.cli.answer import AnswerError, first_model
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
from vllm_diffusion.drafting.commands.growth import Growth
from vllm_diffusion.drafting.commands.prompt_sets import Prompt, answers, by_task
from vllm_diffusion.startup.machine import working_accelerator

MODEL_NAME = "target"
# Each round asks the same again.
_OPTIONS = ("--served-model-name", MODEL_NAME, "--no-enable-prefix-caching")


@dataclass(frozen=True)
class Contender:
    """A way to serve the target.

    Attributes:
        name: In the table.
        options: Of ``vllm serve``, beside those of all.
        note: What a reader must know of it.
        passes: Over each block, of a DFlash draft that always drafts; 0 of another.
        url: Root of a server that runs already; empty for one that is started.
        rule: By which a model of this package is served, where rules are compared; empty where drafts are.
    """

    name: str
    options: tuple[str, ...] = ()
    note: str = ""
    passes: int = 0
    url: str = ""
    rule: str = ""


@dataclass(frozen=True)
class Round:
    """The prompts of one task, answered once.

    Attributes:
        task: Of the prompts.
        concurrency: Requests at a time.
        index: Of the round.
        seconds: From the first request to the last answer.
        processor_seconds: Of the server's processes, meanwhile: what else a machine does is not in it.
        counted: By the server, in these seconds.
        said: Token ids of every answer, in the order of the prompts.
    """

    task: str
    concurrency: int
    index: int
    seconds: float
    processor_seconds: float
    counted: Growth
    said: tuple[tuple[int, ...], ...]


@dataclass
class Result:
    """Measurements of one contender.

    Attributes:
        contender: Whose.
        rounds: All that count.
        resident_bytes: The most memory that its processes had, summed; 0 if it is not known.
        device_bytes: Memory of GPUs at the end, 0 on a machine without one; ``None`` if it is not known.
        failure: Why it has no figures; empty if it has.
    """

    contender: Contender
    rounds: list[Round] = field(default_factory=list)
    resident_bytes: int = 0
    device_bytes: int | None = None
    failure: str = ""

    def of(self, concurrency: int, task: str | None = None) -> list[Round]:
        """Return the rounds with so many requests at a time, of one task or of all."""
        return [
            each
            for each in self.rounds
            if each.concurrency == concurrency and task in (None, each.task)
        ]

    def says_as(self, other: Result) -> bool:
        """Return whether every answer is the same, token by token."""
        theirs = {(r.task, r.concurrency, r.index): r.said for r in other.rounds}
        return all(theirs.get((r.task, r.concurrency, r.index)) == r.said for r in self.rounds)


def verifications(rounds: Iterable[Round]) -> Verifications:
    """Sum the verifications of rounds."""
    return sum((each.counted.verifications for each in rounds), Verifications())


@dataclass(frozen=True)
class Plan:
    """Requests that every contender gets.

    Attributes:
        prompts: All of them.
        concurrencies: Requests at a time, one after another.
        num_rounds: That count; one more before them is for what is compiled and cached.
        max_tokens: Longest answer.
        temperature: 0 for the likeliest tokens.
    """

    prompts: tuple[Prompt, ...]
    concurrencies: tuple[int, ...]
    num_rounds: int
    max_tokens: int
    temperature: float

    def tasks(self) -> dict[str, list[Prompt]]:
        """Group the prompts by task."""
        return by_task(self.prompts)


@dataclass(frozen=True)
class _Asked:
    """Server that answers for one contender.

    Attributes:
        result: Measurements of the contender.
        url: Root of the server.
        model: Name under which the server knows the target.
        server: The server if this process started it. Another one has the key of the environment; its
            processes are not known, and it is not stopped.
    """

    result: Result
    url: str
    model: str
    server: Server | None = None

    def processes(self) -> list[int]:
        """Return the ids of the server's processes, as far as they are known."""
        return [] if self.server is None else self.server.processes()


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
        plan: What is asked.
        serve_options: Of every server.
        one_at_a_time: Whether a server is stopped before the next one starts.
        verbose: Whether what the servers print is printed, as it comes.

    Returns:
        One for each contender, in their order; one that failed says why, and the others go on.
    """
    results = [Result(contender) for contender in contenders]
    for group in [[each] for each in results] if one_at_a_time else [results]:
        with ExitStack() as stack:
            running: list[_Asked] = []
            for result in group:
                if url := result.contender.url:
                    try:
                        running.append(_Asked(result, url, first_model(openai_client(url))))
                    except AnswerError as error:
                        result.failure = str(error)
                    continue
                server = Server(
                    vllm_serve(target, *_OPTIONS, *serve_options, *result.contender.options),
                    report=say,
                    timeout=1800.0,
                    environment={"VLLM_NO_USAGE_STATS": "1"},
                    verbose=verbose,
                )
                say(f"Starting a server: {result.contender.name}")
                try:
                    _check_memory(running)
                    stack.enter_context(server)
                    running.append(_Asked(result, server.url, MODEL_NAME, server))
                except ServerError as error:
                    result.failure = str(error)
                    if hasattr(server, "log_path"):
                        log = server.log_path.read_text(encoding="utf-8", errors="replace")
                        result.failure = f"{refusal(log) or error} (log: {server.log_path})"
                    say(f"         {result.failure}")
            _ask_all(running, plan)
            for each in running:
                each.result.resident_bytes = sum(map(peak_resident_bytes, each.processes()))
                if each.server is not None:
                    each.result.device_bytes = device_bytes(each.processes())
    return results


def _ask_all(running: Sequence[_Asked], plan: Plan) -> None:
    for index in range(plan.num_rounds + 1):
        for concurrency in plan.concurrencies:
            say(
                f"Round {index} of {plan.num_rounds}, {concurrency} at a time"
                + ("" if index else " (not counted)")
            )
            for task, prompts in plan.tasks().items():
                for server in running:
                    result = server.result
                    if result.failure:
                        continue
                    try:
                        found = _ask(server, task, prompts, plan, concurrency, index)
                    except (AnswerError, ServerError, ValueError) as error:
                        result.failure = f"{task}: {error}"
                        say(f"         {result.contender.name}: {result.failure}")
                        continue
                    if index:
                        result.rounds.append(found)


def _ask(
    server: _Asked,
    task: str,
    prompts: Sequence[Prompt],
    plan: Plan,
    concurrency: int,
    index: int,
) -> Round:
    client = openai_client(server.url, server.server.api_key if server.server else None)
    options = {
        "model": server.model,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
    }
    before = read_metrics(server.url)
    used = processor_seconds(server.processes())
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answered = list(pool.map(lambda prompt: answers(client, prompt, options), prompts))
    seconds = time.perf_counter() - start
    used = processor_seconds(server.processes()) - used
    said = tuple(tokens for each in answered for tokens in each)
    expected = totals(before).get(ANSWERED, 0.0) + len(said)
    growth = Growth.between(before, metrics_after(server.url, expected, seconds=30.0))
    if growth.requests < len(said):
        raise ServerError(
            f"The server counts {growth.requests:.0f} of {len(said)} requests on /metrics."
        )
    return Round(task, concurrency, index, seconds, used, growth, said)


def _check_memory(running: Sequence[_Asked]) -> None:
    """Refuse another server where there may be no room for one as large as the largest.

    Raises:
        ServerError: With the remedy.
    """
    largest = max((sum(map(peak_resident_bytes, each.processes())) for each in running), default=0)
    available = psutil.virtual_memory().available
    if largest > available:
        raise ServerError(
            f"{available / 2**30:.1f} GiB of memory are left, and a server takes {largest / 2**30:.1f}: "
            "set --one-at-a-time, or leave something out"
        )


def refusal(log: str) -> str:
    """Return the line of a server's log that says why it did not start; empty if none does."""
    lines = [re.sub(r"^\(\w+ pid=\d+\)\s*", "", line).strip() for line in log.splitlines()]
    ours = [line for line in lines if line.startswith("vllm-diffusion: ")]
    if ours:
        return ours[-1]
    # An option of vLLM's that its parser refuses.
    usage = [line for line in lines if re.match(r"vllm[\w. ]*: error: \S", line)]
    if usage:
        return usage[0]
    # The first error is the cause of those behind it.
    for number, line in enumerate(lines):
        if re.match(r"(?:\w+\.)*\w*(?:Error|Exception): \S", line):
            # pydantic names the field and what is wrong with it in the next two.
            is_whole = not re.search(r"\d+ validation errors? for \w+$", line)
            return line if is_whole else " ".join(lines[number : number + 3])
    return ""


def peak_resident_bytes(process: int) -> int:
    """Return the most that a process had in memory, shared pages included; 0 where that is not known."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def processor_seconds(processes: Sequence[int]) -> float:
    """Sum the seconds of all cores that processes have used; those that have ended count nothing."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = psutil.Process(process).cpu_times()
            total += times.user + times.system
    return total


def device_bytes(processes: Sequence[int]) -> int | None:
    """Sum the memory of processes on GPUs: 0 on a machine without one, ``None`` where it is not known."""
    if working_accelerator() is None:
        return 0
    try:
        from vllm.utils.import_utils import import_pynvml

        nvml = import_pynvml()
        nvml.nvmlInit()
        try:
            devices = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            used = [
                each.usedGpuMemory
                for device in devices
                for each in nvml.nvmlDeviceGetComputeRunningProcesses(device)
                if each.pid in processes
            ]
        finally:
            nvml.nvmlShutdown()
    except Exception:
        # No driver, or one that does not tell.
        return None
    return sum(used) if used and None not in used else None
