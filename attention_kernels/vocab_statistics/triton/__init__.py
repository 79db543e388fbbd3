"""Statistics of a tile of logits, and sweeps over rows that were kept, in Triton."""

from attention_kernels.vocab_statistics.triton.kept_rows import (
    draw,
    largest_logit,
    scaled_logits,
    weigh,
)
from attention_kernels.vocab_statistics.triton.narrow import narrow
from attention_kernels.vocab_statistics.triton.update import update_statistics

__all__ = [
    "draw",
    "largest_logit",
    "narrow",
    "scaled_logits",
    "update_statistics",
    "weigh",
]
