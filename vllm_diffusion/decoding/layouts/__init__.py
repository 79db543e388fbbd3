"""Layouts of canvases in a sequence; a family names one."""

from vllm_diffusion.decoding.layouts.blocks import (
    AlignedBlock,
    SeededBlock,
    ShiftedBlock,
    VerifiedDraft,
)
from vllm_diffusion.decoding.layouts.canvas_layout import (
    CanvasLayout,
    FreeCanvas,
    SampledRows,
    ScheduledRequest,
)

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
