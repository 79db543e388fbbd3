"""Revealing of masks in a draft's block: how many a pass reveals, which, and as which tokens.

A schedule gives the share of the block that is still masked after a share ``t`` of the passes. The
counts are differences of one falling sequence, so they sum to the block whatever they round to.

The number of tensor operations does not depend on the number of requests and positions, and none of
them waits for the device: a CUDA graph can hold them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

CONFIDENCE, POSITION = ORDERS = ("confidence", "position")
SCHEDULES: dict[str, Callable[[float], float]] = {
    # Few positions first, most in the last pass.
    "cosine": lambda t: math.cos(math.pi / 2 * t),
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: math.sqrt(1 - t),
}


def unmask_counts(num_positions: int, steps: int, schedule: str) -> tuple[int, ...]:
    """Return the positions that each pass reveals: ``steps`` counts that sum to ``num_positions``.

    Args:
        num_positions: Number of masks of the block, without its anchor.
        steps: Passes over the block.
        schedule: A key of :data:`SCHEDULES`.

    Raises:
        ValueError: If the schedule is unknown, or has no pass or more passes than positions.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; set it to one of {list(SCHEDULES)}.")
    if not 1 <= steps <= num_positions:
        raise ValueError(
            f"steps={steps} is not possible: each pass reveals at least one of the block's "
            f"{num_positions} positions; set steps to 1..{num_positions}."
        )
    counts = []
    masked = num_positions
    for step in range(1, steps + 1):
        share = SCHEDULES[schedule](step / steps)
        # Each later pass keeps at least one mask, and this pass reveals at least one.
        left = min(max(round(share * num_positions), steps - step), masked - 1)
        counts.append(masked - left)
        masked = left
    return tuple(counts)


def without_mask_token(logits: Tensor, mask_token_id: int) -> Tensor:
    """Set the mask token's logits to minus infinity, in place, so that it is never proposed.

    Args:
        logits: [..., vocab_size], written.
        mask_token_id: Token that marks a position as not revealed.
    """
    logits[..., mask_token_id] = float("-inf")
    return logits


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's most likely token, and its probability.

    Args:
        logits: [..., vocab_size], any float dtype.

    Returns:
        Tokens, [...], int64, and probabilities, [...], float32. Among equal logits the token is
        that of ``argmax``, which vLLM proposes from the same row.
    """
    tokens = logits.argmax(dim=-1)
    log_sum = torch.logsumexp(logits.float(), dim=-1)
    top = logits.gather(-1, tokens[..., None]).squeeze(-1).float()
    return tokens, (top - log_sum).exp()


def revealed(order: str, masked: Tensor, confidence: Tensor, count: int) -> Tensor:
    """Choose the masks that a pass reveals, ``count`` of each request, which has at least as many.

    Args:
        order: One of :data:`ORDERS`: the most confident, the leftmost of equals first; or the
            leftmost.
        masked: [num_reqs, num_positions], bool, the masks.
        confidence: [num_reqs, num_positions], float32, probabilities.
        count: Number of masks to reveal in each request.

    Returns:
        [num_reqs, num_positions], bool.
    """
    if order == POSITION:
        return masked & (masked.cumsum(dim=-1) <= count)
    # Below every probability; a NaN is above, so that the masks alone are chosen from in any case.
    scores = torch.where(masked, confidence, -1.0)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(masked).scatter_(-1, chosen, True)
