"""Operators of torch on the null GPU with true values, in a graph."""

from __future__ import annotations

import torch

from tests.support.null_gpu import true_values


def replayed() -> list[float]:
    """A sum of products and choices in a graph, of its first inputs and of others."""
    true_values.compute()
    x, index = torch.ones(2, 2, device="cuda"), torch.tensor([0, 1, 1]).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (x @ x)[index].sum()
    found = []
    for value in (0, 1):
        graph.replay()
        found.append(total.item())
        index.fill_(value)
        x[value] += 1
    return found
