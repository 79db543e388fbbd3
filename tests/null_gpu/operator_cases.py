"""Operators of torch on the null GPU with true values, eager and in a graph, compared with the CPU's."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.null_gpu import true_values


def several(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Products, reductions, sorting, choices, writes in place and through views, and tensors made here."""
    product = x @ x.T
    written = x.clone()
    written[index] = 2.0
    written[:, 1].mul_(3)
    written.index_add_(0, index, x[index])
    ordered, order = x.sort(dim=1, descending=True)
    return (
        product.softmax(dim=-1),
        product.logsumexp(dim=1),
        torch.where(x > 0, x, 2.0),
        written,
        ordered.cumsum(dim=0),
        order,
        *x.topk(2, dim=1),
        x.argmax(dim=0),
        torch.cat([x, x + 1], dim=1).to(torch.bfloat16),
        x.view(torch.int32) ^ (2**31 - 1),
        torch.arange(5, device=x.device) * index.sum(),
        torch.zeros(3, device=x.device).scatter_(0, index, 1.0),
        torch.nn.functional.embedding(index, x),
        torch.full((2, 2), 7, device=x.device).clamp_(max=6),
        torch.gather(x, 1, order),
        x.max(dim=1).values,
    )


def compare() -> dict[str, list[int]]:
    """The results that differ from the CPU's: eager, in a graph with its first inputs, and with others."""
    inputs = [
        (torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)), torch.tensor(index))
        for seed, index in enumerate(([0, 2], [1, 2]))
    ]
    expected = [several(*each) for each in inputs]
    true_values.compute()
    x, index = (tensor.cuda() for tensor in inputs[0])
    eager = several(x, index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = several(x, index)
    graph.replay()
    wrong = {"eager": differing(eager, expected[0]), "graph": differing(captured, expected[0])}
    x.copy_(inputs[1][0])
    index.copy_(inputs[1][1])
    graph.replay()
    return wrong | {"graph, other inputs": differing(captured, expected[1])}


def differing(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[int]:
    """Positions at which results differ."""
    return [
        position
        for position, (one, other) in enumerate(zip(found, expected, strict=True))
        if not torch.equal(one.cpu(), other)
    ]
