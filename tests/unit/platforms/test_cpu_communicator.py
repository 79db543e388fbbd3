"""A row's sum over ranks does not depend on which rows lie beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.ranks import ThreadRanks
from vllm_diffusion.platforms.cpu_communicator import OrderedCpuCommunicator


def summed(num_ranks: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """The sum on the last rank of the first rows of each rank."""
    ranks = ThreadRanks(num_ranks)

    def work(rank: int) -> Tensor:
        # Its constructor wants the process groups of a whole server.
        communicator = OrderedCpuCommunicator.__new__(OrderedCpuCommunicator)
        communicator.all_gather = ranks.all_gather
        return communicator.all_reduce(shares(rank, dtype)[:num_rows])

    first, *others = ranks.run(work)
    assert all(torch.equal(first, other) for other in others)
    return first


def shares(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(100, 128, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rows_do_not_depend_on_their_number(num_ranks, dtype):
    whole = summed(num_ranks, 100, dtype)
    exact = torch.stack([shares(rank, dtype).double() for rank in range(num_ranks)]).sum(0)
    atol = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(whole.double(), exact, atol=atol, rtol=0)
    for num_rows in (1, 16, 32, 65):
        assert torch.equal(summed(num_ranks, num_rows, dtype), whole[:num_rows])
