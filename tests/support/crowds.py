"""Requests put into an engine by hand, and honest ones behind many that are not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engine import TracedEngine

# Steps a canvas.
CAP = 6
NUM_HONEST = 8
# Room for as many requests at once.
CROWDED: Mapping[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}

LEGAL: Sequence[Mapping[str, Any]] = ({"constraint": {}, "ignore_eos": True},)
HOSTILE: Sequence[Mapping[str, Any]] = (
    {"constraint": {"regex": "a{5}"}, "bad_words": ["a"]},
    {"constraint": {"json": {"$ref": "#"}}},
    {"constraint": {"regex": r"ab[^\s\S]"}},
    {"constraint": {"grammar": 'root ::= root "a"'}},
    {"constraint": {"regex": "([xyz]{3}-){40}"}},
    {"constraint": {"regex": "[A-Z]{64}"}, "temperature": 2.0, "repetition_penalty": 100.0},
    {"constraint": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 30}}},
    {"constraint": {"regex": "[0-9]{64}"}, "presence_penalty": -2.0, "bad_words": ["1", "2"]},
)


def constrained(engine: TracedEngine, constraint: Mapping[str, Any], **options: Any) -> Any:
    """Parameters of a seeded request with few steps a canvas."""
    options = {"seed": 3, "max_tokens": 48, "extra_args": {"diffusion_max_steps": CAP}, **options}
    return engine.sampling_params(
        structured_outputs=StructuredOutputsParams(**constraint) if constraint else None, **options
    )


def add(engine: TracedEngine, name: str, params: Any) -> None:
    """Hand a request to the engine."""
    tokens = engine.llm.get_tokenizer().encode("What is 7+8?")
    engine.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), params)


def drain(engine: TracedEngine, most: int = 600) -> tuple[dict[str, Any], dict[str, int]]:
    """Run the engine empty: each request's output, and the step that brought the last of it."""
    core = engine.llm.llm_engine
    outputs, ended = {}, {}
    for step in range(most):
        if not core.has_unfinished_requests():
            return outputs, ended
        for output in core.step():
            if output.finished:
                outputs[output.request_id] = output.outputs[0]
                ended[output.request_id] = step
        if not engine.scheduler.running:
            # As the engine's process does: a thread that compiles a grammar has to have its turn.
            time.sleep(0.001)
    raise AssertionError(
        f"after {most} steps {core.get_num_unfinished_requests()} requests are unfinished"
    )


class LastAnswer(NamedTuple):
    """When the last of some requests ended.

    Attributes:
        step: Of the engine.
        seconds: Since its first step.
    """

    step: int
    seconds: float


def last_honest_answer(
    engine: TracedEngine, others: Sequence[Mapping[str, Any]], num_others: int
) -> LastAnswer:
    """Put honest requests behind many others, and run all of them to their ends."""
    for i in range(num_others):
        options = dict(others[i % len(others)])
        constraint = options.pop("constraint")
        params = constrained(engine, constraint, seed=i, max_tokens=64, **options)
        add(engine, f"other {i}", params)
    honest = {f"honest {i}" for i in range(NUM_HONEST)}
    for i, name in enumerate(sorted(honest)):
        add(engine, name, constrained(engine, {}, seed=i, ignore_eos=True))
    core, start, last = engine.llm.llm_engine, time.perf_counter(), LastAnswer(0, 0.0)
    for step in range(20_000):
        if not core.has_unfinished_requests():
            return last
        if any(output.finished and output.request_id in honest for output in core.step()):
            last = LastAnswer(step, time.perf_counter() - start)
    raise AssertionError(f"{core.get_num_unfinished_requests()} requests do not end")
