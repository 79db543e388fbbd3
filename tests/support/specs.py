"""Canvas specifications for tests that have no checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import AlignedBlock
from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.kernel_choice.step_shape import free_canvas


def diffusion_gemma_spec(length: int, max_denoising_steps: int = 48, **changes: Any) -> CanvasSpec:
    """What DiffusionGemma is published with, at another length."""
    return replace(free_canvas(length), max_denoising_steps=max_denoising_steps, **changes)


def masked_spec(length: int, **changes: Any) -> CanvasSpec:
    """Blocks of masks, as SDAR's."""
    settings = {"reveal_threshold": 0.9, "strategy": "dynamic"}
    own = {"rule": Reveal(4), "max_denoising_steps": length, "settings": settings}
    return CanvasSpec(AlignedBlock(length), **(own | {"mask_token_id": 4} | changes))
