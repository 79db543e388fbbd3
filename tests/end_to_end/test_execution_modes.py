"""Two ranks, asynchronous scheduling and other precision give the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils

from tests.support.engines.engine import TracedEngine, run_here
from tests.support.engines.generate import run_engine, small_engine
from tests.support.models.prompts import random_prompt
from tests.support.oracles.oracle import Oracle
from vllm_diffusion.runner import model_state as base

pytestmark = pytest.mark.engine

CANVAS = 32
NUM_REQUESTS = 4


def generation_job(checkpoint: Any, **engine: Any) -> dict[str, Any]:
    """Return seeded requests of two canvases in one batch."""
    return {
        "engine": small_engine(checkpoint, **engine),
        "batches": [
            [
                {
                    "prompt": random_prompt(20 + 30 * i, i),
                    "params": {"max_tokens": 2 * CANVAS, "ignore_eos": True, "seed": i},
                }
                for i in range(NUM_REQUESTS)
            ]
        ],
    }


@pytest.fixture(scope="module")
def expected(oracle):
    return [
        oracle.generate(
            random_prompt(20 + 30 * i, i), seed=i, max_tokens=2 * CANVAS, ignore_eos=True
        ).tokens
        for i in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({"async_scheduling": True}, "async, encode separate"),
        ({}, "sync, encode fused with the next canvas"),
    ],
    ids=["asynchronous", "default"],
)
def test_order_of_passes(options, order, checkpoint, expected, monkeypatch):
    """Every order of passes gives the answers of the reference."""
    said = []
    monkeypatch.setattr(
        base.logger, "info_once", lambda line, *args: said.append(line % args if args else line)
    )
    answers = run_here(generation_job(checkpoint, **options))
    assert [request["tokens"] for request in answers[0]] == expected
    (line,) = (
        text.partition("vllm-diffusion serves this model: ")[2]
        for text in said
        if "vllm-diffusion serves this model" in text
    )
    assert line == (
        "model DiffusionGemmaForBlockDiffusion, sampler DiffusionSampler, attention "
        f"vllm_diffusion.attention.backend.CanvasAttentionBackend, scheduler canvas_scheduler ({order})"
    )


def test_step_is_compiled_before_a_request(checkpoint, expected):
    """An engine that is ready has compiled its step as requests need it, so none waits."""
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    with TracedEngine(checkpoint, enforce_eager=False) as engine:
        at_start = counted["unique_graphs"]
        assert at_start >= 1
        prompts = [random_prompt(20 + 30 * i, i) for i in range(NUM_REQUESTS)]
        answers = engine.generate(
            prompts, seeds=list(range(NUM_REQUESTS)), max_tokens=2 * CANVAS, ignore_eos=True
        )
        assert counted["unique_graphs"] == at_start
    assert [list(answer.token_ids) for answer in answers] == expected


SETTINGS = [
    {"top_p": 0.7, "top_k": 40},
    {"min_p": 0.05, "temperature": 1.4},
    {"logprobs": 4, "logit_bias": {50: 3.0, 200: 2.0}, "min_tokens": 40},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "allowed_token_ids": [40, 41, 250, 270]},
]


# At this temperature no token is likely, and every candidate is kept: what a filter keeps shows.
UNSURE = {
    "diffusion_t_max": 20.0,
    "diffusion_t_min": 20.0,
    "diffusion_entropy_bound": 1000.0,
    "diffusion_max_steps": 4,
}


def filtered_requests(setting: dict[str, Any]) -> list[dict[str, Any]]:
    params = {"max_tokens": 4 * CANVAS, "ignore_eos": True, "extra_args": UNSURE} | setting
    return [{"prompt": random_prompt(30, 50 + i), "params": params | {"seed": i}} for i in range(4)]


def test_two_ranks(checkpoint, expected):
    """Two processes with half of the vocabulary each give the same tokens.

    They communicate over gloo, and take sums in another order.
    """
    answers = run_engine(generation_job(checkpoint, tensor_parallel_size=2))["batches"]
    assert [request["tokens"] for request in answers[0]] == expected


@pytest.mark.slow
def test_settings_on_two_ranks(checkpoint):
    """Two ranks give the same tokens with any sampling setting, alone and in a batch."""
    settings = [
        {
            "prompt": random_prompt(30, 50 + i),
            "params": {"max_tokens": 2 * CANVAS, "seed": i, "ignore_eos": True} | setting,
        }
        for i, setting in enumerate(SETTINGS)
    ]
    filtered = [
        filtered_requests(setting) for setting in ({"top_k": 20}, {"top_p": 0.5}, {"min_p": 0.5})
    ]
    last_alone = [requests[-1:] for requests in filtered]
    job = {
        "engine": small_engine(checkpoint),
        "batches": [settings, *filtered, *last_alone],
    }
    one = run_here(job)
    two = run_engine(job | {"engine": job["engine"] | {"tensor_parallel_size": 2}})["batches"]
    assert [request["tokens"] for request in two[0]] == [request["tokens"] for request in one[0]]
    for ours, theirs in zip(two[0][2]["logprobs"], one[0][2]["logprobs"], strict=True):
        pairs = zip(ours, theirs, strict=True)
        assert all(a == b or abs(a - b) < 1e-3 for a, b in pairs)
    tokens = [[request["tokens"] for request in batch] for batch in two]
    assert tokens[1:4] == [[request["tokens"] for request in batch] for batch in one[1:4]]
    assert [batch[-1:] for batch in tokens[1:4]] == tokens[4:]


def test_bfloat16(checkpoint, oracle):
    """In bf16, where both sides round at every layer, the distributions stay close."""
    prompt = random_prompt(150, 9)
    with TracedEngine(checkpoint, dtype="bfloat16") as engine, engine.recording() as steps:
        engine.generate([prompt], seeds=[1], max_tokens=CANVAS, ignore_eos=True)
    theirs = Oracle(checkpoint, dtype=torch.bfloat16).first_step(prompt, steps[0].canvas.tolist())
    exact = oracle.first_step(prompt, steps[0].canvas.tolist())

    def divergence(logits: torch.Tensor) -> float:
        reference = exact.double().log_softmax(-1)
        other = logits.double().log_softmax(-1)
        return (reference.exp() * (reference - other)).sum(-1).mean().item()

    ours, hf = divergence(steps[0].logits), divergence(theirs)
    print(f"\nKL from float32, first step: ours {ours:.1e} nats, transformers {hf:.1e} nats")
    # Not further from float32 than the reference implementation in the same precision, twice over.
    assert ours <= 2 * hf + 1e-4
