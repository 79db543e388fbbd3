"""Statistics of each row's logits for sampling, without a copy of the logits in float32."""

from attention_kernels.vocab_statistics.api import (
    Impl,
    add_product,
    draw,
    largest_key,
    largest_logit,
    largest_logits,
    scaled_logits,
    update_statistics,
    weigh,
)
from attention_kernels.vocab_statistics.logits import (
    LAST_RESORT,
    MASS_SCALE,
    NO_ID,
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
from attention_kernels.vocab_statistics.search import LEAST_KEY

__all__ = [
    "LAST_RESORT",
    "LEAST_KEY",
    "MASS_SCALE",
    "NO_ID",
    "FilteredDraw",
    "Impl",
    "LogitAdjustments",
    "RowDraws",
    "RowLogits",
    "RunningStatistics",
    "add_product",
    "draw",
    "drawn_share",
    "largest_key",
    "largest_logit",
    "largest_logits",
    "ordered_keys",
    "scaled_logits",
    "update_statistics",
    "weigh",
]
