"""Layouts of canvases in a sequence; a family names one."""

from vllm_diffusion.layouts.aligned_block import AlignedBlock
from vllm_diffusion.layouts.canvas_layout import (
    CanvasLayout,
    FreeCanvas,
    SampledRows,
    ScheduledRequest,
)
from vllm_diffusion.layouts.seeded_block import SeededBlock, ShiftedBlock
from vllm_diffusion.layouts.verified_draft import VerifiedDraft

__all__ = [
    "AlignedBlock",
    "CanvasLayout",
    "FreeCanvas",
    "ScheduledRequest",
    "SampledRows",
    "SeededBlock",
    "ShiftedBlock",
    "VerifiedDraft",
]
