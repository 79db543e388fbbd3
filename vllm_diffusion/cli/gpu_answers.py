"""Comparison of the shipped checkpoint's answers, served with the default options, with a CPU's.

Kernels that are right one by one do not show that compiled functions and captured graphs are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_diffusion.checkpoints import ANSWERS, shipped_checkpoint
from vllm_diffusion.cli.checkpoint import (
    MODEL_NAME,
    SERVE_ENVIRONMENT,
    START_SECONDS,
    end_with_signals,
)
from vllm_diffusion.cli.client import ServerError, openai_client, read_metrics
from vllm_diffusion.cli.console import say
from vllm_diffusion.cli.server import Server, vllm_serve

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

# As the recorded answers were asked for; no answer is as long.
ASKED: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": 192}
# Every so many questions one is asked alone, and the others so many at once.
ALONE, AT_ONCE = 5, 16
# Recorded answers are the same in float32. A fault that was seen changed 239 of 240.
MOST_DIFFERENT = 2
# All 0 on a server that has answered everything, at the latest after so many seconds.
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
IDLE_SECONDS = 10.0
# What may avoid a fault, the cheapest first.
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("--compilation-config", '{"cudagraph_mode": "NONE"}'),
    ("--compilation-config", '{"mode": 0}'),
    ("--enforce-eager",),
    ("--additional-config", '{"diffusion": {"attention": "reference"}}'),
)


class Question(NamedTuple):
    """A held-out question.

    Attributes:
        messages: As an OpenAI client sends them.
        answer: Answer of a CPU.
    """

    messages: list[dict[str, Any]]
    answer: str

    def difference(self, answer: str) -> str:
        """Say what differs on one line."""
        question = self.messages[-1]["content"]
        return f"{question!r}: {answer!r}, and not {self.answer!r}"


# Questions -> their answers, in the same order.
Ask = Callable[[Sequence[Question]], list[str]]


class Answered(NamedTuple):
    """Outcome of the questions with some options.

    Attributes:
        problem: What is wrong; empty if nothing is.
        different: A line for each answer that differs.
    """

    problem: str
    different: tuple[str, ...] = ()


def recorded() -> list[Question]:
    """Read the questions and the CPU's answers."""
    lines = ANSWERS.read_text(encoding="utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]


def compare(questions: Sequence[Question], ask: Ask) -> Answered:
    """Compare answers with those of a CPU: of some questions alone, and of the others together."""
    together = [each for i, each in enumerate(questions) if i % ALONE]
    batches = [[each] for each in questions[::ALONE]] + [together] * bool(together)
    pairs = [pair for batch in batches for pair in zip(batch, ask(batch), strict=True)]
    different = tuple(
        each.difference(answer) for each, answer in pairs if answer.strip() != each.answer.strip()
    )
    if len(different) <= MOST_DIFFERENT:
        return Answered("", different)
    return Answered(f"{len(different)} of {len(pairs)} answers differ from a CPU's", different)


def serve_and_compare(options: Sequence[str]) -> Answered:
    """Serve the shipped checkpoint with further options, and compare its answers."""
    end_with_signals()
    server = Server(
        vllm_serve(str(shipped_checkpoint()), "--served-model-name", MODEL_NAME, *options),
        report=say,
        timeout=START_SECONDS,
        environment=SERVE_ENVIRONMENT,
    )
    try:
        with server, openai_client(server.url, server.api_key) as client:

            def ask_one(question: Question) -> str:
                messages: Any = question.messages
                answer = client.chat.completions.create(
                    model=MODEL_NAME, messages=messages, **ASKED
                )
                return answer.choices[0].message.content or ""

            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = compare(recorded(), lambda batch: list(pool.map(ask_one, batch)))
            return found if found.problem else found._replace(problem=left_over(server.url))
    except ServerError as error:
        say(server.log_end())
        return Answered(str(error))
    except Exception as error:
        # The client raised it: the server failed while it answered.
        say(server.log_end())
        return Answered(f"The server did not answer: {type(error).__name__}: {error}")


def left_over(url: str) -> str:
    """Say what a server still holds although it has answered everything; empty for nothing."""
    end = time.monotonic() + IDLE_SECONDS
    while (found := held(read_metrics(url))) and time.monotonic() < end:
        time.sleep(0.2)
    named = ", ".join(f"{name} is {value:g}" for name, value in found.items())
    return f"The server has answered everything, and {named}" if named else ""


def held(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the gauges of requests and pages that are not 0, of what ``/metrics`` says."""
    return {each.name: each.value for each in samples if each.name in GAUGES and each.value}


def problems(
    serve: Callable[[Sequence[str]], Answered] = serve_and_compare,
) -> Iterator[str]:
    """Yield what is wrong with a server's answers, and the first option that avoids it."""
    found = serve(())
    say(f"{len(found.different)} answers differ from a CPU's")
    if not found.problem:
        return
    yield found.problem
    yield from found.different[:3]
    for options in OPTIONS:
        line = " ".join(f"'{each}'" if "{" in each else each for each in options)
        say(f"Asking again with {line}")
        if not serve(options).problem:
            yield f"Right with {line}"
            return
    yield "No option that was tried avoids it; do not serve on this GPU, and report it"
