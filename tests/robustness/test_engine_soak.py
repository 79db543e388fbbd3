"""Thousands of a campaign's requests in an engine that can be looked into, short of memory.

    pytest -m slow tests/robustness/test_engine_soak.py

What a server cannot show: whatever a request takes while it runs (slots, rows, tables, blocks) is
given back, after random aborts and preemptions too. A sample of the answers is what the same
requests get alone, token by token.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.exceptions import VLLMClientError

from tests.integration.test_nothing_left import in_use
from tests.robustness.requests import CHAT, COMPLETIONS, Request, Served, draw_request
from tests.support.checkpoints import SHIPPED
from tests.support.engine import TracedEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_REQUESTS = 2_000
OUTSTANDING = 12
SEED = 11
MAX_MODEL_LEN = 320
COMPARED = 60


def described() -> dict[str, Any]:
    """Of a server's description as much as drawing a request looks at."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for path, request in ((COMPLETIONS, CompletionRequest), (CHAT, ChatCompletionRequest)):
        schema = request.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {}) | {request.__name__: schema}
        body = {"schema": {"$ref": f"#/components/schemas/{request.__name__}"}}
        paths[path] = {"post": {"requestBody": {"content": {"application/json": body}}}}
    return {"paths": paths, "components": {"schemas": schemas}}


def draw_completions(served: Served, count: int) -> list[Request]:
    """Valid and edge completions: what needs no server's protocol."""
    drawn: list[Request] = []
    number = 0
    while len(drawn) < count:
        request = draw_request(served, SEED, number)
        if request.path == COMPLETIONS and request.kind != "hostile":
            drawn.append(request)
        number += 1
    return drawn


def parsed(request: Request, seed: int) -> tuple[Any, Any]:
    """Prompt and ``SamplingParams``, as vLLM's server makes them of a request.

    Raises:
        ValueError: If its protocol refuses it.
    """
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = {key: value for key, value in request.body.items() if key != "stream"}
    completion = CompletionRequest(**{"seed": seed} | body)
    params = completion.to_sampling_params(completion.max_tokens or 100, {})
    prompt = completion.prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}, params
    return {"prompt_token_ids": prompt}, params


def said(output: Any) -> list[Any]:
    """Tokens and finish reason of each choice."""
    choices = sorted(output.outputs, key=lambda choice: choice.index)
    return [(list(choice.token_ids), choice.finish_reason) for choice in choices]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_soak(asynchronous: bool) -> None:
    """Nothing is left, and a sample of the answers is the same alone."""
    engine = TracedEngine(
        SHIPPED,
        async_scheduling=asynchronous,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1024**2,
    )
    core = engine.llm.llm_engine
    served = Served(
        engine.state.canvas_length, 316, MAX_MODEL_LEN, images=False, openapi=described()
    )
    requests = draw_completions(served, NUM_REQUESTS)
    rng = random.Random(SEED)
    before = in_use(engine)
    answers: dict[str, Any] = {}
    waiting: set[str] = set()
    num_sent = num_refused = num_aborted = 0
    try:
        while num_sent < NUM_REQUESTS or waiting:
            while num_sent < NUM_REQUESTS and len(waiting) < OUTSTANDING:
                name = f"{num_sent:08d}"
                num_sent += 1
                try:
                    core.add_request(name, *parsed(requests[num_sent - 1], num_sent - 1))
                    waiting.add(name)
                except (ValueError, VLLMClientError):
                    assert requests[num_sent - 1].kind == "edge", requests[num_sent - 1]
                    num_refused += 1
            for output in core.step():
                if output.finished:
                    answers[output.request_id] = said(output)
                    waiting.discard(output.request_id)
            if waiting and rng.random() < 0.02:
                victim = rng.choice(sorted(waiting))
                core.abort_request([victim])
                waiting.discard(victim)
                num_aborted += 1
        # The runner hears of a request's end with the next pass.
        core.step()
        assert in_use(engine) == before
        assert len(answers) == NUM_REQUESTS - num_aborted - num_refused
        assert engine.preempted
        print(
            f"\n{len(answers)} answers, {num_refused} refused, {num_aborted} aborted, "
            f"{len(engine.preempted)} preemptions"
        )
        for name in rng.sample(sorted(answers), COMPARED):
            prompt, params = parsed(requests[int(name)], int(name))
            (alone,) = engine.llm.generate([prompt], [params], use_tqdm=False)
            assert said(alone) == answers[name], requests[int(name)]
    finally:
        engine.close()
