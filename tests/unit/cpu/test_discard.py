"""Memory that is given back: what was in it is gone, addresses and neighbours stay."""

from __future__ import annotations

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.cpu.worker import discard


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.data())
def test_neighbours(sizes: list[int], data: st.DataObject) -> None:
    """Some of several tensors become zero, to the last byte; the others, and every address, stay."""
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
    """The process holds less by what the tensors held, views and arrays of them notwithstanding."""
    tensor = torch.ones(16 * 2**20)
    views = [tensor[5:], tensor.view(4, -1), *([tensor.numpy()] if shares_numpy else [])]
    process = psutil.Process()
    before = process.memory_info().rss
    given_back = discard([tensor, *(view for view in views if isinstance(view, torch.Tensor))])
    after = process.memory_info().rss
    assert tensor.nbytes - 2**14 <= given_back <= tensor.nbytes
    assert before - after > 0.9 * given_back
    assert all((view == 0).all() for view in views)
