"""Thousands of requests of every kind on one engine that is short of memory.

    pytest -m slow tests/integration/test_soak.py

Random lengths, widths and settings, random aborts, and a cache small enough to force preemption. At
the end nothing is left, and a sample of the answers is what the same requests get alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.test_nothing_left import in_use
from tests.support.checkpoints import SHIPPED
from tests.support.engine import TracedEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_REQUESTS = 2_000
OUTSTANDING = 12


def random_request(rng: random.Random, canvas_length: int) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a prompt, and sampling parameters."""
    prompt = [rng.randrange(24, 276) for _ in range(rng.randint(1, 120))]
    extra: dict[str, Any] = {"diffusion_max_steps": rng.randint(1, 4)}
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 150), "extra_args": extra}
    if rng.random() < 0.3:
        extra["diffusion_canvas_length"] = rng.randint(4, canvas_length)
    if rng.random() < 0.3:
        params |= {"temperature": rng.choice([0.0, 0.5, 1.5]), "top_k": rng.randint(1, 40)}
    if rng.random() < 0.1:
        params |= {"presence_penalty": 1.0, "repetition_penalty": 1.2}
    if rng.random() < 0.1:
        params["logprobs"] = 2
    if rng.random() < 0.05:
        params["prompt_logprobs"] = 0
    kind = rng.random()
    if kind < 0.1:
        params["structured_outputs"] = StructuredOutputsParams(regex="[a-f]{3}-[0-9]{1,40}")
    elif kind < 0.15:
        params["bad_words"] = ["e", "th"]
    elif kind < 0.5:
        params["ignore_eos"] = True
    return prompt, params


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_soak(asynchronous: bool) -> None:
    engine = TracedEngine(
        SHIPPED,
        async_scheduling=asynchronous,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1024**2,
    )
    core = engine.llm.llm_engine
    rng = random.Random(11)
    before = in_use(engine)
    requests: dict[str, tuple[list[int], Any]] = {}
    answers: dict[str, Any] = {}
    waiting: set[str] = set()
    num_aborted = 0
    try:
        while len(requests) < NUM_REQUESTS or waiting:
            while len(requests) < NUM_REQUESTS and len(waiting) < OUTSTANDING:
                name = f"{len(requests):08d}"
                prompt, params = random_request(rng, engine.state.canvas_length)
                sampling = engine.sampling_params(seed=len(requests), **params)
                requests[name] = (prompt, params)
                core.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
                waiting.add(name)
            for output in core.step():
                if output.finished:
                    answers[output.request_id] = output.outputs[0]
                    waiting.discard(output.request_id)
            if waiting and rng.random() < 0.02:
                victim = rng.choice(sorted(waiting))
                core.abort_request([victim])
                waiting.discard(victim)
                num_aborted += 1
        # The runner hears of a request's end with the next pass.
        core.step()
        assert in_use(engine) == before
        assert len(answers) == NUM_REQUESTS - num_aborted
        assert engine.preempted
        print(
            f"\n{len(answers)} answers, {num_aborted} aborted, {len(engine.preempted)} preemptions"
        )

        for name in rng.sample(sorted(answers), 60):
            prompt, params = requests[name]
            (alone,) = engine.generate([prompt], seeds=[int(name)], **params)
            assert list(alone.token_ids) == list(answers[name].token_ids), requests[name]
            assert alone.finish_reason == answers[name].finish_reason
    finally:
        engine.close()
