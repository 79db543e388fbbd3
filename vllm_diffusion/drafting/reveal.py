"""Revealing of masks in a draft's block: choice of positions and of their tokens.

The number of tensor operations does not depend on the number of requests and positions, and none of
them waits for the device: a CUDA graph can hold them.
"""

from __future__ import annotations

import torch
from torch import Tensor

CONFIDENCE, POSITION = ORDERS = ("confidence", "position")


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
        order: One of :data:`ORDERS`: the most confident, the leftmost of equals first; or the leftmost.
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
