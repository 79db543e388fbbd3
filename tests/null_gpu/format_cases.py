"""Checkpoints loaded on the null GPU's platform, with a GPU's layers and tensors on the CPU."""

from pathlib import Path
from typing import Any

from tests.null_gpu.engine_cases import decide_outcomes, passes_of, runner_of, start
from tests.support.engines.loading import load, one_rank


def load_each(folders: list[str]) -> list[str]:
    """Return for each checkpoint the error that refused it, or nothing."""
    outcomes = []
    with one_rank():
        for folder in folders:
            try:
                load(Path(folder))
            except (AttributeError, NotImplementedError, ValueError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
            else:
                outcomes.append("")
    return outcomes


def serve_floats(model: str, scheme: str) -> dict[str, Any]:
    """Start an engine that quantizes weights while loading; return its kernels and passes."""
    from vllm_diffusion.weights.formats import describe_kernels

    decide_outcomes()
    llm = start(model, quantization=scheme, dtype="bfloat16", enforce_eager=True)
    kernels = describe_kernels(runner_of(llm).model)
    return {"kernels": kernels, "passes": passes_of(llm, "plain")["passes"]}
