"""A row's sum over ranks does not depend on other rows, and ranks may have few rows or none."""

import resource

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.engines.ranks import ThreadRanks
from vllm_diffusion.cpu import cpu_worker
from vllm_diffusion.cpu.communicator import OrderedCpuCommunicator
from vllm_diffusion.cpu.cpu_worker import discard


def summed(num_ranks: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return the sum on the last rank of the first rows of each rank."""
    ranks = ThreadRanks(num_ranks)

    def work(rank: int) -> Tensor:
        return communicator_of(ranks, rank).all_reduce(shares(rank, dtype)[:num_rows])

    first, *others = ranks.run(work)
    assert all(torch.equal(first, other) for other in others)
    return first


def communicator_of(ranks: ThreadRanks, rank: int) -> OrderedCpuCommunicator:
    # Its constructor wants the process groups of a whole server.
    communicator = OrderedCpuCommunicator.__new__(OrderedCpuCommunicator)
    communicator.all_gather = ranks.all_gather
    communicator.world_size, communicator.rank_in_group = ranks.num_ranks, rank
    return communicator


def shares(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(100, 128, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rows_do_not_depend_on_their_number(num_ranks, dtype):
    """The sum of a row over all ranks has the same bits for any number of rows."""
    whole = summed(num_ranks, 100, dtype)
    exact = torch.stack([shares(rank, dtype).double() for rank in range(num_ranks)]).sum(0)
    atol = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(whole.double(), exact, atol=atol, rtol=0)
    for num_rows in (1, 16, 32, 65):
        assert torch.equal(summed(num_ranks, num_rows, dtype), whole[:num_rows])


@pytest.mark.parametrize("sizes", [[3, 3], [1, 40], [0, 5, 2], None], ids=str)
def test_shares_of_several_sizes(sizes):
    """Shares of any type are gathered in rank order, and each rank gets its part of a sum."""
    rows = sizes or [4, 4]
    ranks = ThreadRanks(len(rows))
    own = [shares(rank, torch.float32)[:num] for rank, num in enumerate(rows)]
    every = [shares(rank, torch.float32)[: sum(rows)] for rank in range(len(rows))]

    def work(rank: int) -> tuple[list[Tensor], Tensor]:
        communicator = communicator_of(ranks, rank)
        ids = own[rank].argsort(dim=-1)
        return (
            communicator.all_gatherv([own[rank], ids], dim=0, sizes=sizes),
            communicator.reduce_scatterv(every[rank], dim=0, sizes=sizes),
        )

    total = torch.stack(every).sum(0).split(rows)
    for rank, ((gathered, ids), summed_rows) in enumerate(ranks.run(work)):
        assert torch.equal(gathered, torch.cat(own))
        assert torch.equal(ids, torch.cat(own).argsort(dim=-1))
        torch.testing.assert_close(summed_rows, total[rank])


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.data())
def test_neighbours(sizes: list[int], data: st.DataObject) -> None:
    """Clearing some tensors leaves their addresses, and all other tensors, unchanged."""
    tensors = [torch.full((size,), 7.0) for size in sizes]
    chosen = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    addresses = [tensor.data_ptr() for tensor in tensors]
    discard(tensors[i] for i in chosen)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for i, tensor in enumerate(tensors):
        assert (tensor == (0 if i in chosen else 7)).all()
        tensor.fill_(3)
        assert (tensor == 3).all()


@pytest.mark.parametrize("shares_numpy", [False, True])
def test_given_back(shares_numpy: bool) -> None:
    """The process shrinks by the tensors' memory even if views and arrays of them exist."""
    tensor = torch.ones(16 * 2**20)
    views = [tensor[5:], tensor.view(4, -1), *([tensor.numpy()] if shares_numpy else [])]
    process = psutil.Process()
    before = process.memory_info().rss
    given_back = discard([tensor, *(view for view in views if isinstance(view, torch.Tensor))])
    after = process.memory_info().rss
    assert tensor.nbytes - 2**14 <= given_back <= tensor.nbytes
    assert before - after > 0.9 * given_back
    assert all((view == 0).all() for view in views)


@pytest.mark.skipif(not hasattr(cpu_worker._LIBC, "mallopt"), reason="only glibc has mallopt")
def test_memory_that_a_pass_frees_is_there_for_the_next_one():
    """Tensors of 48 MiB together fault no page again when they are made a second time."""
    cpu_worker.keep_freed_memory()

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(2**21) for _ in range(6)]
        del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert min(faults() for _ in range(3)) < 100
