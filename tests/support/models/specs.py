"""Canvas specifications and a step's inputs, for tests that have no checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.decoding.layouts import AlignedBlock, FreeCanvas
from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.decoding.rule import DecodingRule, PositionStatistics, StepInputs

# Settings of the shipped checkpoint's rule.
SETTINGS = {
    "entropy_bound": 0.1,
    "confidence_threshold": 0.005,
    "stability_threshold": 1,
    "t_min": 0.4,
    "t_max": 0.8,
}


def diffusion_gemma_spec(length: int, max_denoising_steps: int = 48, **changes: Any) -> CanvasSpec:
    """Return DiffusionGemma's published canvases, with another length."""
    own = {"rule": EntropyBound(), "settings": SETTINGS}
    given = own | {"max_denoising_steps": max_denoising_steps} | changes
    return CanvasSpec.of(given.pop("layout", FreeCanvas(length)), **given)


def masked_spec(length: int, **changes: Any) -> CanvasSpec:
    """Return blocks of masks, as SDAR has."""
    settings = {"reveal_threshold": 0.9, "strategy": "dynamic", **Reveal.defaults}
    own = {"rule": Reveal(4), "max_denoising_steps": length, "settings": settings}
    return CanvasSpec.of(AlignedBlock(length), **(own | {"mask_token_id": 4} | changes))


def step_inputs(**values: Any) -> StepInputs:
    """A rule's inputs of R slots and C positions, with everything not given at zero.

    Args:
        values: Fields of the inputs; the first of two dimensions says R and C.
    """
    R, C = next(v.shape for v in values.values() if v.dim() == 2)
    zeros = torch.zeros(R, C, dtype=torch.int64)
    predicted = {
        "candidate": zeros,
        "drawn_confidence": torch.zeros(R, C),
        "argmax": zeros,
        "entropy": torch.zeros(R, C),
    }
    of_positions = {name: values.pop(name) for name in PositionStatistics._fields if name in values}
    defaults = {
        "canvas": zeros,
        "predicted": PositionStatistics(**(predicted | of_positions)),
        "previous_result": zeros - 1,
        "valid": torch.ones(R, C, dtype=torch.bool),
        "fixed": torch.zeros(R, C, dtype=torch.bool),
        "known": torch.zeros(R, C, dtype=torch.bool),
        "end_tokens": None,
        "step": torch.zeros(R, dtype=torch.int32),
        "max_steps": torch.full((R,), C, dtype=torch.int32),
    }
    return StepInputs(**(defaults | values))


def without_unread(
    rule: DecodingRule, inputs: StepInputs, settings: Mapping[str, Any]
) -> StepInputs:
    """Return inputs with other statistics where a rule says that it reads none."""
    num_known = inputs.known.sum(dim=-1, dtype=torch.int32)
    read = rule.read(inputs.canvas, num_known, settings)
    assert read is not None
    changed = {
        name: torch.where(read, value, value + 1)
        for name, value in inputs.predicted._asdict().items()
        if value is not None
    }
    return inputs.with_predicted(**changed)
