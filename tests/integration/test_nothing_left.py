"""Requests that are over leave no slot, block, object or memory in use."""

import gc
import random
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.engine import TracedEngine
from tests.support.models.checkpoints import SHIPPED

pytestmark = pytest.mark.engine

# What an allocator may keep for itself over any number of requests.
ALLOWED_GROWTH_BYTES = 48 * 1024**2


@pytest.fixture(scope="module")
def engine() -> Iterator[TracedEngine]:
    with TracedEngine(SHIPPED, max_model_len=256, max_num_seqs=4) as traced:
        yield traced


def test_an_abort_while_the_prompt_runs() -> None:
    """An abort during the prompt leaves nothing, although log-probabilities arrive later."""
    with TracedEngine(SHIPPED, max_model_len=256, async_scheduling=True) as engine:
        core = engine.llm.llm_engine
        params = engine.sampling_params(max_tokens=4, prompt_logprobs=0, logit_bias={40: 1.0})
        core.add_request("gone", {"prompt_token_ids": [30] * 20}, params)
        core.step()
        core.abort_request(["gone"])
        core.add_request("next", {"prompt_token_ids": [30] * 5}, engine.sampling_params())
        engine.finish()
        engine.check_integrity()


def live_objects() -> dict[str, int]:
    """Return how many tensors and requests Python holds."""
    from vllm.v1.request import Request

    gc.collect()
    tensors = requests = 0
    for thing in gc.get_objects():
        tensors += type(thing) is torch.Tensor
        requests += type(thing) is Request
    return {"tensors": tensors, "requests": requests}


def run_batch(engine: TracedEngine, rng: random.Random, num_requests: int) -> None:
    """Run short requests of every kind, some aborted while they wait or run."""
    core = engine.llm.llm_engine
    canvas_length = engine.state.canvas_length
    for index in range(num_requests):
        kinds: list[dict[str, Any]] = [
            {},
            {"extra_args": {"diffusion_canvas_length": rng.randint(1, canvas_length)}},
            {
                "extra_args": {"diffusion_read_only": True, "diffusion_constrained": True},
                "logprob_token_ids": [60, 61],
            },
            {"logprobs": 2},
            {"prompt_logprobs": 1},
            {"bad_words": ["e", "in"]},
            {"structured_outputs": StructuredOutputsParams(regex="[a-f]{2,9}")},
            {"max_tokens": canvas_length + 1, "ignore_eos": True},
        ]
        params = {"max_tokens": rng.randint(1, 2), "seed": index} | rng.choice(kinds)
        params["extra_args"] = {"diffusion_max_steps": 1} | params.get("extra_args", {})
        name = f"{rng.getrandbits(64):x}"
        prompt = [rng.randrange(50, 200) for _ in range(rng.randint(1, 60))]
        core.add_request(name, {"prompt_token_ids": prompt}, engine.sampling_params(**params))
        if rng.random() < 0.2:
            for _ in range(rng.randint(0, 2)):
                core.step()
            core.abort_request([name])
    engine.finish()
    engine.check_integrity()


@pytest.mark.parametrize("num_requests", [10, pytest.param(500, marks=pytest.mark.slow)])
def test_requests_leave_nothing(engine: TracedEngine, num_requests: int) -> None:
    """More requests, a fifth of them aborted, leave the engine as the first twenty did, and a slot
    that others used before gives the same tokens.
    """
    request = {"seeds": [11], "max_tokens": 40, "ignore_eos": True}
    first = engine.generate([[60, 61, 62]], **request)[0].token_ids
    rng = random.Random(0)
    run_batch(engine, rng, 20)
    objects, rss = live_objects(), psutil.Process().memory_info().rss
    for _ in range(num_requests // 10):
        run_batch(engine, rng, 10)
    after = live_objects()
    assert after["requests"] <= objects["requests"]
    # A few are kept from call to call.
    assert after["tensors"] <= objects["tensors"] + 8, (objects, after)
    assert psutil.Process().memory_info().rss <= rss + ALLOWED_GROWTH_BYTES
    assert engine.generate([[60, 61, 62]], **request)[0].token_ids == first
