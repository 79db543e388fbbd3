"""Laws of a target and its draft, from the tensors of a launch that verifies drafts.

Names of fields are those of the arguments of vLLM's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllm_diffusion.cpu.sampling_kernels import Floats

ZERO, ONE = np.float32(0), np.float32(1)


def number(element: Tensor) -> np.float32:
    return np.float32(element.item())


def draft_row(
    draft_logits: Tensor, request: int, step: int, vocab_size: int, temp: np.float32
) -> Floats:
    """Return the logits that a draft was drawn from, [vocab_size], divided by the temperature."""
    row: Floats = draft_logits[request, step, :vocab_size].float().numpy()
    return row / temp


def _log_sum(maxima: Floats, sums: Floats, padded: int) -> np.float32:
    """Return the log of a row's whole sum of exponentials, from its blocks' sums."""
    largest = maxima.max()
    parts = np.zeros(padded, np.float32)
    parts[: len(sums)] = sums * np.exp(maxima - largest)
    total: np.float32 = largest + np.log(parts.sum())
    return total


@dataclass(frozen=True)
class Target:
    """Logits of the target at each row.

    Attributes:
        target_logits: [num_rows, vocab_size].
        target_local_max: [num_rows, num_blocks], each block's maximum.
        target_local_sumexp: [num_rows, num_blocks], each block's sum of exponentials relative to it.
        PADDED_VOCAB_NUM_BLOCKS: Number of blocks that the kernel adds, the last ones empty.
    """

    target_logits: Tensor
    target_local_max: Tensor
    target_local_sumexp: Tensor
    PADDED_VOCAB_NUM_BLOCKS: int

    def log_sum(self, row: int) -> np.float32:
        """Return the log of the sum of exponentials of a row."""
        maxima, sums = self.target_local_max[row].numpy(), self.target_local_sumexp[row].numpy()
        return _log_sum(maxima, sums, self.PADDED_VOCAB_NUM_BLOCKS)

    def log_prob(self, row: int, token: int) -> np.float32:
        """Return the log of a token's probability."""
        return number(self.target_logits[row, token]) - self.log_sum(row)


@dataclass(frozen=True)
class Draft:
    """Proposals at each row, and the logits that they were drawn from.

    Attributes:
        draft_sampled: [num_rows], the proposals, each at the row after the one that verifies it; -1 if
            there is none.
        draft_logits: [num_slots, num_steps, vocab_size]; ``None`` if proposals are likeliest tokens.
        draft_local_max: As the target's.
        draft_local_sumexp: As the target's.
        PADDED_VOCAB_NUM_BLOCKS: As the target's.
    """

    draft_sampled: Tensor
    draft_logits: Tensor | None
    draft_local_max: Tensor
    draft_local_sumexp: Tensor
    PADDED_VOCAB_NUM_BLOCKS: int

    def token(self, row: int) -> int:
        """Return the proposal that a row verifies; -1 if there is none."""
        return int(self.draft_sampled[row + 1])

    def log_sum(self, row: int) -> np.float32:
        """Return the log of the sum of exponentials of a row; 0 without logits."""
        if self.draft_logits is None:
            return ZERO
        maxima, sums = self.draft_local_max[row].numpy(), self.draft_local_sumexp[row].numpy()
        return _log_sum(maxima, sums, self.PADDED_VOCAB_NUM_BLOCKS)

    def log_prob(
        self, row: int, request: int, step: int, token: int, temp: np.float32
    ) -> np.float32:
        """Return the log of a token's probability; 0 without logits."""
        if self.draft_logits is None:
            return ZERO
        return number(self.draft_logits[request, step, token]) / temp - self.log_sum(row)


@dataclass(frozen=True)
class Joint:
    """Ratios of block verification.

    Attributes:
        cumulative_log_p: [num_rows], of :func:`cumulative_log_p`; ``None`` if each draft is verified by itself.
        local_residual_mass: [num_rows, num_blocks], of :func:`residual_mass`; ``None`` if proposals are
            likeliest tokens.
        vocab_num_blocks: Number of blocks.
    """

    cumulative_log_p: Tensor | None
    local_residual_mass: Tensor | None
    vocab_num_blocks: int

    def threshold(self, row: int, following: int, target: Target) -> np.float32:
        """Return the bound below which a uniform number accepts all drafts up to a row's.

        Args:
            row: The row that verifies the last of them.
            following: The draft behind it; -1 if there is none.
            target: What the target says.
        """
        assert self.cumulative_log_p is not None
        joint: np.float32 = np.exp(number(self.cumulative_log_p[row]))
        if following < 0:
            return joint
        if self.local_residual_mass is not None:
            parts = np.zeros(target.PADDED_VOCAB_NUM_BLOCKS, np.float32)
            parts[: self.vocab_num_blocks] = self.local_residual_mass[row + 1].numpy()
            mass = parts.sum()
        else:
            mass = joint * (ONE - np.exp(target.log_prob(row + 1, following)))
        whole = mass + ONE - joint
        return mass / whole if whole > 0 else ONE
