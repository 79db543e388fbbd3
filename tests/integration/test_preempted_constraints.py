"""A constrained canvas that loses its memory starts again, as if it had never begun."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from tests.support.checkpoints import SHIPPED
from tests.support.engine import TracedEngine
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.engine

NUM_REQUESTS = 24


@pytest.mark.parametrize(
    "asynchronous",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["synchronous", "asynchronous"],
)
def test_preempted_constraints(asynchronous: bool) -> None:
    """Also where a pass of the canvas was on its way when its request was preempted."""
    engine = TracedEngine(
        SHIPPED,
        async_scheduling=asynchronous,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1024**2,
        enable_prefix_caching=False,
    )
    core = engine.llm.llm_engine

    def params(index: int) -> Any:
        return engine.sampling_params(
            seed=index,
            temperature=1.5,
            max_tokens=100,
            extra_args={"diffusion_max_steps": 2 + index % 2},
            structured_outputs=StructuredOutputsParams(regex="[a-f]{3}-[0-9]{1,40}"),
        )

    prompts = [random_prompt(20 + 9 * (i % 5), i) for i in range(NUM_REQUESTS)]
    together: dict[int, list[int]] = {}
    try:
        for i, prompt in enumerate(prompts):
            core.add_request(str(i), TokensPrompt(prompt_token_ids=prompt), params(i))
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    together[int(output.request_id)] = list(output.outputs[0].token_ids)
        assert engine.preempted
        for i, prompt in enumerate(prompts):
            (alone,) = engine.llm.generate(
                [{"prompt_token_ids": prompt}], params(i), use_tqdm=False
            )
            assert together[i] == list(alone.outputs[0].token_ids), i
    finally:
        engine.close()
