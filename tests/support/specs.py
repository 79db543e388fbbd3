"""Canvas specifications for tests that have no checkpoint."""

from __future__ import annotations

from typing import Any

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.layouts import AlignedBlock, FreeCanvas

SETTINGS = {
    "entropy_bound": 0.1,
    "confidence_threshold": 0.005,
    "stability_threshold": 1,
    "t_min": 0.4,
    "t_max": 0.8,
}


def diffusion_gemma_spec(length: int, max_denoising_steps: int = 48, **changes: Any) -> CanvasSpec:
    """What DiffusionGemma is published with, at another length."""
    layout = FreeCanvas(length)
    return CanvasSpec(layout, EntropyBound(), max_denoising_steps, SETTINGS, **changes)


def masked_spec(length: int, **changes: Any) -> CanvasSpec:
    """Blocks of masks, as SDAR's."""
    settings = {"reveal_threshold": 0.9, "strategy": "dynamic"}
    own = {"rule": Reveal(4), "max_denoising_steps": length, "settings": settings}
    return CanvasSpec(AlignedBlock(length), **(own | {"mask_token_id": 4} | changes))
