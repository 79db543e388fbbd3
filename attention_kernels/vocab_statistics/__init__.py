"""What a denoising step needs of each row's logits, one tile of the vocabulary at a time."""

from attention_kernels.vocab_statistics.api import (
    Impl,
    RowDraws,
    RunningStatistics,
    update_statistics,
)

__all__ = ["Impl", "RowDraws", "RunningStatistics", "update_statistics"]
