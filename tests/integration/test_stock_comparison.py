"""Compares stock vLLM's own class with the oracle, on the same platform and checkpoint.

Both are requested, through the public API, to read one seeded canvas in one step and report its
log-probabilities. The figures are printed; ``pytest -s`` shows them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.engine import run_here
from tests.support.engines.generate import run_engine, small_engine
from tests.support.models.checkpoints import random_checkpoint
from tests.support.models.prompts import random_prompt
from tests.support.oracles.oracle import Oracle

pytestmark = pytest.mark.engine

CANVAS, VOCAB = 32, 320


def read(prompt: list[int], canvas: list[int]) -> dict[str, Any]:
    """Return a request that denoises ``canvas`` once and reports its distribution."""
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


def job_of(checkpoint: Path, request: dict[str, Any], **more: Any) -> dict[str, Any]:
    engine = small_engine(checkpoint, max_logprobs=-1, prefix_cache_retention_interval=None)
    return {"engine": engine, "batches": [[request]], **more}


def run_stock(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run stock's class in a process that never imports ours."""
    return run_engine(job, VLLM_PLUGINS="vllm_diffusion_cpu")["batches"]


def divergence(answer: dict[str, Any], logits: torch.Tensor) -> float:
    """Return the mean KL divergence of the engine from the oracle over positions, in nats."""
    ours = torch.tensor(answer["logprobs"], dtype=torch.float64)
    theirs = logits.double().log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


# A process of stock's; ours alone is compared with the oracle in test_parity.py.
@pytest.mark.slow
def test_sliding_window(checkpoint, oracle):
    """With a context of four windows every canvas row sees the last keys before its canvas."""
    prompt, canvas = random_prompt(100, 1), random_prompt(CANVAS, 2)
    job = job_of(checkpoint, read(prompt, canvas))
    logits = oracle.first_step(prompt, canvas)
    ours = divergence(run_here(job)[0][0], logits)
    stock = divergence(run_stock(job)[0][0], logits)
    print(f"\nwindow 24, canvas {CANVAS}: ours {ours:.1e} nats, stock {stock:.2g} nats")
    assert abs(ours) < 1e-6
    assert stock > 0.1


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_here, id="ours"),
        pytest.param(run_stock, id="stock", marks=pytest.mark.slow),
    ],
)
def test_canvas_on_encoded_canvases(run, tmp_path):
    """A canvas after 256 cached generated tokens is right with a window wider than the context."""
    checkpoint = random_checkpoint(tmp_path, text_config={"sliding_window": 2048})
    prompt, canvas = random_prompt(20, 3), random_prompt(CANVAS, 4)
    generate = {
        "prompt": prompt,
        "params": {
            # The last canvas is not in the cache: ours never encodes it.
            "max_tokens": 9 * CANVAS,
            "ignore_eos": True,
            "extra_args": {"diffusion_max_steps": 2},
        },
    }
    # One engine: it reads on top of what it generated itself.
    job = job_of(checkpoint, generate, then_read=read([], canvas))
    (generated,), (reading,) = run(job)
    context = prompt + generated["tokens"]
    assert reading["num_cached_tokens"] >= 256
    figure = divergence(reading, Oracle(checkpoint).first_step(context, canvas))
    print(f"\n256 encoded tokens from the prefix cache, {run.__name__}: {figure:.2g} nats")
    if run is run_stock:
        assert figure > 0.1
    else:
        assert abs(figure) < 1e-6
