"""Where stock vLLM's own class, on the same platform and checkpoint, departs from the oracle.

Both are asked, through the public API, to read one seeded canvas in one step and report its
log-probabilities. The figures are printed; ``pytest -s`` shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import random_checkpoint
from tests.support.generate import run_engine
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.engine

CANVAS, VOCAB = 32, 320
OURS = {"VLLM_PLUGINS": "vllm_diffusion_cpu,vllm_diffusion"}
STOCK = {"VLLM_PLUGINS": "vllm_diffusion_cpu"}


def read(prompt: list[int], canvas: list[int]) -> dict[str, Any]:
    """A request that denoises ``canvas`` once and reports its distribution at temperature 1."""
    return {
        "prompt": prompt,
        "params": {
            "max_tokens": CANVAS,
            "logprobs": VOCAB,
            "extra_args": {
                "diffusion_seed_canvas": canvas,
                "diffusion_max_steps": 1,
                "diffusion_read_only": True,
            },
        },
    }


def engine_arguments(checkpoint: Path) -> dict[str, Any]:
    return {
        "model": str(checkpoint),
        "max_model_len": 1024,
        "max_num_seqs": 2,
        "max_logprobs": -1,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 * 1024**2,
        "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
        "prefix_cache_retention_interval": None,
    }


def divergence(answer: dict[str, Any], logits: torch.Tensor) -> float:
    """KL of the oracle's distribution from the engine's, mean over positions, in nats."""
    ours = torch.tensor(answer["logprobs"], dtype=torch.float64)
    theirs = logits.double().log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


def test_sliding_window(tmp_path):
    """A context of four windows: every canvas row sees the same last keys before its canvas."""
    checkpoint = random_checkpoint(tmp_path)
    prompt, canvas = random_prompt(100, 1), random_prompt(CANVAS, 2)
    job = {"engine": engine_arguments(checkpoint), "batches": [[read(prompt, canvas)]]}
    logits = Oracle(checkpoint).first_step(prompt, canvas)
    ours = divergence(run_engine(job, **OURS)["batches"][0][0], logits)
    stock = divergence(run_engine(job, **STOCK)["batches"][0][0], logits)
    print(f"\nwindow 24, canvas {CANVAS}: ours {ours:.1e} nats, stock {stock:.2g} nats")
    assert abs(ours) < 1e-6
    assert stock > 0.1


def test_canvas_on_encoded_canvases(tmp_path):
    """256 generated tokens from the prefix cache, with a window wider than the context."""
    checkpoint = random_checkpoint(tmp_path, text_config={"sliding_window": 2048})
    prompt, canvas = random_prompt(20, 3), random_prompt(CANVAS, 4)
    oracle = Oracle(checkpoint)
    generate = {
        "prompt": prompt,
        "params": {
            # The last canvas is not in the cache: ours never encodes it.
            "max_tokens": 9 * CANVAS,
            "ignore_eos": True,
            "extra_args": {"diffusion_max_steps": 2},
        },
    }
    figures = {}
    # One process each: generate, and read on top of what that very process generated.
    for name, environment in (("ours", OURS), ("stock", STOCK)):
        job = {
            "engine": engine_arguments(checkpoint),
            "batches": [[generate]],
            "then_read": read([], canvas),
        }
        answer = run_engine(job, **environment)
        context = prompt + answer["batches"][0][0]["tokens"]
        reading = answer["batches"][1][0]
        assert reading["num_cached_tokens"] >= 256
        figures[name] = divergence(reading, oracle.first_step(context, canvas))
    print(
        f"\n256 encoded tokens from the prefix cache: ours {figures['ours']:.1e} nats, "
        f"stock {figures['stock']:.2g} nats"
    )
    assert abs(figures["ours"]) < 1e-6
    assert figures["stock"] > 0.1
