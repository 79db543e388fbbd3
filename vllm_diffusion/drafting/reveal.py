"""Which masks of a draft's block a pass reveals, and with what.

All of it is a fixed number of tensor operations whatever the number of requests and positions, and
none waits for the device: a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

CONFIDENCE, POSITION = ORDERS = ("confidence", "position")


def without_mask_token(logits: Tensor, mask_token_id: int) -> Tensor:
    """``logits`` with that of the mask token at minus infinity, in place: it is never proposed.

    Args:
        logits: [..., vocab_size], written.
        mask_token_id: Stands for "not yet revealed".
    """
    logits[..., mask_token_id] = float("-inf")
    return logits


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's most likely token, and its probability.

    Args:
        logits: [..., vocab_size], any float dtype.

    Returns:
        [...], int64, and [...], float32. Among equal logits the token is that of ``argmax``, which is
        what vLLM proposes from the same row.
    """
    tokens = logits.argmax(dim=-1)
    log_sum = torch.logsumexp(logits.float(), dim=-1)
    top = logits.gather(-1, tokens[..., None]).squeeze(-1).float()
    return tokens, (top - log_sum).exp()


def revealed(order: str, masked: Tensor, confidence: Tensor, count: int) -> Tensor:
    """The masks that a pass reveals: ``count`` of each request's, which has as many.

    Args:
        order: One of :data:`ORDERS`: the most confident, the leftmost of equals first; or the leftmost.
        masked: [num_reqs, num_positions], bool, the masks.
        confidence: [num_reqs, num_positions], float32, probabilities.
        count: How many.

    Returns:
        [num_reqs, num_positions], bool.
    """
    if order == POSITION:
        return masked & (masked.cumsum(dim=-1) <= count)
    # Below every probability; a NaN is above, so that the masks alone are chosen from in any case.
    scores = torch.where(masked, confidence, -1.0)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(masked).scatter_(-1, chosen, True)
