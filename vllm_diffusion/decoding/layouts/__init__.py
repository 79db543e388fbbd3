"""Layouts of canvases in a sequence; a family names one."""

from vllm_diffusion.decoding.layouts.blocks import (
    AlignedBlock,
    BlockAfterPrompt,
    CausalDraft,
    FirstTokenBlock,
    ShiftedBlock,
    VerifiedDraft,
)
from vllm_diffusion.decoding.layouts.canvas_layout import (
    AnswerSizes,
    CanvasLayout,
    FirstRows,
    FreeCanvas,
    ScheduledRequest,
    span_variants,
)
from vllm_diffusion.decoding.layouts.whole_sequence import (
    GrowingSequence,
    SequenceOfBlocks,
    ShiftedSequence,
    WholeSequence,
)

__all__ = [
    "AlignedBlock",
    "AnswerSizes",
    "BlockAfterPrompt",
    "CanvasLayout",
    "CausalDraft",
    "FreeCanvas",
    "GrowingSequence",
    "ScheduledRequest",
    "FirstRows",
    "FirstTokenBlock",
    "SequenceOfBlocks",
    "ShiftedBlock",
    "ShiftedSequence",
    "VerifiedDraft",
    "WholeSequence",
    "span_variants",
]
