"""The CPU's functions that sample and score tokens equal plain arithmetic in float64, and each of
them writes what the Triton kernel that it replaces writes.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.engines.commands import run
from vllm_diffusion.cpu import sampling_kernels
from vllm_diffusion.cpu.launches import Launch, overrides

pytestmark = pytest.mark.engine

VOCAB = 300
FILTER = "vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel"


def some_logits(num_rows: int) -> Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(5))


def launch_filter(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """Launch as vLLM does, with all arguments by name and an option of the compiler."""
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
    """Return the tokens that the filters keep in a row, by their definition."""
    order = np.argsort(-logits)[:top_k]
    probabilities = np.exp(logits[order] - logits[order[0]])
    before = np.cumsum(probabilities) - probabilities
    return set(order[before < top_p * probabilities.sum()].tolist())


@pytest.mark.parametrize("uses", ["top_k", "top_p", "both"])
def test_filters(uses: str) -> None:
    """Each row keeps the likeliest logits that its own filters allow, and masks the others."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at_a_time", [1, 3 * VOCAB, 1 << 22])
def test_log_probabilities(
    at_a_time: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and ranks equal a float64 softmax, however many rows are computed together."""
    monkeypatch.setattr(sampling_kernels, "_LOGITS_AT_A_TIME", at_a_time)
    logits = some_logits(7).to(dtype)
    listed = torch.randint(0, VOCAB, (7, 4), generator=torch.Generator().manual_seed(1))
    scores, ranks = torch.empty(7, 4), torch.empty(7, dtype=torch.int64)
    of = Launch(logits=logits, vocab_size=VOCAB, BLOCK_SIZE=1024, topk_ids=listed, output=scores)
    sampling_kernels.topk_log_softmax(of)
    of.token_ids, of.output = listed[:, 0], ranks
    sampling_kernels.ranks(of)
    exact = logits.double().log_softmax(-1).gather(1, listed)
    torch.testing.assert_close(scores.double(), exact, atol=5e-6, rtol=0)
    for row, token, rank in zip(
        logits.tolist(), listed[:, 0].tolist(), ranks.tolist(), strict=True
    ):
        assert rank == sum(value >= row[token] for value in row)


def test_tokens_of_a_prompt() -> None:
    """Each row is scored with the token after it, except the last row of the prompt."""
    ids = torch.arange(24, dtype=torch.int32).reshape(3, 8)
    of = Launch(all_token_ids=ids, prompt_logprobs_token_ids=torch.full((7,), -1))
    of.query_start_loc, of.idx_mapping = torch.tensor([0, 3, 7]), torch.tensor([2, 0])
    of.num_computed_tokens = torch.tensor([4, 9, 1])
    sampling_kernels.prompt_logprobs_token_ids(of)
    assert of.prompt_logprobs_token_ids.tolist() == [18, 19, 20, 5, 6, 7, 0]


def test_nans() -> None:
    """The NaNs of each row are counted, and infinities are not."""
    logits = some_logits(3)
    logits[1, :4], logits[2, 5], logits[2, 7:9] = float("nan"), float("nan"), float("inf")
    counts = torch.empty(3, dtype=torch.int32)
    sampling_kernels.num_nans(Launch(logits=logits, num_nans=counts))
    assert counts.tolist() == [0, 4, 1]


CHECKS = Path(__file__).with_name("check_cpu_kernels.py")


@pytest.mark.slow
def test_against_the_triton_kernels():
    """Every function equals its Triton kernel in a fresh process that interprets the kernels."""
    assert "21 kernels agree" in run(sys.executable, CHECKS, timeout=600).stdout
