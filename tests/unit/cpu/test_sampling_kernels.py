"""What samples and scores tokens on the CPU computes what plain arithmetic in float64 does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_diffusion.cpu import sampling_kernels
from vllm_diffusion.cpu.launches import overrides

pytestmark = pytest.mark.engine

VOCAB = 300
FILTER = "vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel"


def some_logits(num_rows: int) -> Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(5))


def launch_filter(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """Launch as vLLM does: all arguments by name, with an option of the compiler."""
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.sample.ops.topk_topp_triton import _topk_topp_kernel

    stand_in = KernelOverride(
        _topk_topp_kernel, overrides({FILTER: sampling_kernels.OVERRIDES[FILTER]})[FILTER]
    )
    given: dict[str, Any] = dict.fromkeys(stand_in.arg_names)
    given |= {"LOGITS": logits, "LOGITS_STRIDE_0": logits.stride(0), "MASK_VALUE": float("-inf")}
    given["K"] = logits if top_k is None else top_k
    given["P"] = logits if top_p is None else top_p
    given |= {"TOPK_ENABLED": top_k is not None, "TOPP_ENABLED": top_p is not None}
    stand_in[(1,)](**given, num_warps=4)


def kept(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Return the tokens that the filters leave of a row, by their definition."""
    order = np.argsort(-logits)[:top_k]
    probabilities = np.exp(logits[order] - logits[order[0]])
    before = np.cumsum(probabilities) - probabilities
    return set(order[before < top_p * probabilities.sum()].tolist())


@pytest.mark.parametrize("uses", ["top_k", "top_p", "both"])
def test_filters(uses: str) -> None:
    """The likeliest tokens are left with their logits, and all others are masked, each row by its own filters."""
    counts, shares = [1, 5, VOCAB, 40, 2, VOCAB], [1.0, 0.9, 0.5, 1e-6, 0.3, 1.0]
    logits = some_logits(len(counts))
    # A view of a wider tensor, as a padded vocabulary leaves it.
    filtered = torch.cat([logits, logits], dim=1)[:, :VOCAB]
    use_k, use_p = uses != "top_p", uses != "top_k"
    launch_filter(
        filtered,
        torch.tensor(counts, dtype=torch.int32) if use_k else None,
        torch.tensor(shares) if use_p else None,
    )
    for row, (count, share) in enumerate(zip(counts, shares, strict=True)):
        exact = logits[row].double().numpy()
        expected = kept(exact, count if use_k else VOCAB, share if use_p else 1.0)
        left = filtered[row].isfinite().nonzero()[:, 0]
        assert set(left.tolist()) == expected, row
        assert torch.equal(filtered[row, left], logits[row, left])


def test_nans() -> None:
    """The NaNs of each row are counted, and infinities are not."""
    logits = some_logits(3)
    logits[1, :4], logits[2, 5], logits[2, 7:9] = float("nan"), float("nan"), float("inf")
    counts = torch.empty(3, dtype=torch.int32)
    sampling_kernels.num_nans(logits, counts)
    assert counts.tolist() == [0, 4, 1]
