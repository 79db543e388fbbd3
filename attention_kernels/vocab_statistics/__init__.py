"""What sampling needs of each row's logits, without a copy of them in float32."""

from attention_kernels.vocab_statistics.api import (
    Impl,
    draw,
    largest_logit,
    scaled_logits,
    update_statistics,
    weigh,
)
from attention_kernels.vocab_statistics.logits import (
    LAST_RESORT,
    MASS_SCALE,
    LogitAdjustments,
    RowLogits,
    ordered_keys,
)
from attention_kernels.vocab_statistics.running import (
    FilteredDraw,
    RowDraws,
    RunningStatistics,
    drawn_share,
)
from attention_kernels.vocab_statistics.search import LEAST_KEY, largest_key

__all__ = [
    "LAST_RESORT",
    "LEAST_KEY",
    "MASS_SCALE",
    "FilteredDraw",
    "Impl",
    "LogitAdjustments",
    "RowDraws",
    "RowLogits",
    "RunningStatistics",
    "draw",
    "drawn_share",
    "largest_key",
    "largest_logit",
    "ordered_keys",
    "scaled_logits",
    "update_statistics",
    "weigh",
]
