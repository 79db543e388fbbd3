"""Requests that lose their memory while they run give the answers that each gets alone."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.test_predictions import LIST, QUESTION, asked
from tests.support.engines.engine import ASYNCHRONOUS_OFTEN, TracedEngine
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.prompts import random_prompt
from tests.support.oracles.frames import EVERY_FIELD, Watched, steps_that_decided
from vllm_diffusion.metrics import request_metrics

pytestmark = pytest.mark.engine

KINDS: dict[str, dict[str, Any]] = {
    "frames": {
        "temperature": 1.5,
        "max_tokens": 96,
        "ignore_eos": True,
        "extra_args": EVERY_FIELD | {"diffusion_max_steps": 6},
    },
    "predictions": {
        "max_tokens": 160,
        "ignore_eos": True,
        "extra_args": {"diffusion_prediction": LIST, "diffusion_max_steps": 4},
    },
    "constraints": {
        "temperature": 1.5,
        "max_tokens": 100,
        "extra_args": {"diffusion_max_steps": 3},
        "structured_outputs": StructuredOutputsParams(regex="[a-f]{3}-[0-9]{1,40}"),
    },
}


@pytest.fixture(scope="module", params=ASYNCHRONOUS_OFTEN)
def engine(request: pytest.FixtureRequest) -> Iterator[TracedEngine]:
    with TracedEngine(
        SHIPPED,
        async_scheduling=request.param,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1024**2,
        enable_prefix_caching=False,
    ) as tight:
        yield tight


@pytest.mark.parametrize("kind", KINDS)
def test_answers(engine: TracedEngine, kind: str) -> None:
    """Constraints, predictions and frames survive a preemption, also with a pass of the canvas on
    its way; a canvas that begins anew has a mark.
    """
    params = [engine.sampling_params(seed=i, **KINDS[kind]) for i in range(8)]
    prompts = [random_prompt(20 + 9 * (i % 5), i) for i in range(len(params))]
    if kind == "predictions":
        prompts = [asked(engine, QUESTION)] * len(params)
    engine.preempted.clear()
    together = Watched(engine.llm, prompts, params)
    assert engine.preempted
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        (answer,) = together.outputs[i].outputs
        (alone,) = Watched(engine.llm, [prompt], [one]).outputs[0].outputs
        assert answer.token_ids == alone.token_ids
        mine, theirs = (
            request_metrics(each).accepted_prediction_tokens for each in (answer, alone)
        )
        assert mine == theirs
        assert (mine > 0) == (kind == "predictions")
        if kind == "frames":
            assert answer.diffusion_step_map == alone.diffusion_step_map
            assert answer.diffusion_trace == alone.diffusion_trace
            replayed = steps_that_decided(together.canvases(i), has_mask=False)
            assert list(answer.diffusion_step_map) == replayed[: len(answer.token_ids)]
    begun_anew = any(frame.begins_anew for each in together.frames.values() for frame in each)
    assert begun_anew == (kind == "frames")
