"""Output heads without a model, whole and in tensor-parallel parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_diffusion.sampling.output_head import OutputHead


def output_head(weight: Tensor, softcap: float | None = None, **changes: Any) -> OutputHead:
    """A head whose embedding is its weight."""
    fields = {
        "weight": weight,
        "embedding": weight,
        "first_id": 0,
        "softcap": softcap,
        "dtype": weight.dtype,
        "matmul": F.linear,
        "num_shards": 1,
        "shard_size": weight.shape[0],
    }
    return OutputHead(**(fields | changes))


def identity_head(vocab_size: int) -> OutputHead:
    """Its rows are their own logits."""
    return output_head(torch.eye(vocab_size))


class _Exchange:
    """Ranks that are threads meet here."""

    def __init__(self, num_shards: int) -> None:
        self.values: list[Any] = [None] * num_shards
        self.barrier = threading.Barrier(num_shards, timeout=120)


@dataclass(frozen=True)
class _Shard(OutputHead):
    rank: int
    exchange: _Exchange

    def gather(self, values: Tensor) -> Tensor:
        self.exchange.values[self.rank] = values
        self.exchange.barrier.wait()
        gathered = torch.stack(self.exchange.values)
        self.exchange.barrier.wait()
        return gathered

    def sum(self, values: Tensor) -> Tensor:
        return self.gather(values).sum(dim=0, dtype=values.dtype)


def on_shards(
    weight: Tensor, borders: list[int], softcap: float | None, run: Callable[[OutputHead], Any]
) -> list[Any]:
    """What ``run`` returns on each rank when the ids are cut at ``borders``."""
    bounds = [0, *borders, weight.shape[0]]
    exchange = _Exchange(len(bounds) - 1)
    results: list[Any] = [None] * (len(bounds) - 1)

    def work(rank: int) -> None:
        part = weight[bounds[rank] : bounds[rank + 1]]
        whole = output_head(part, softcap, first_id=bounds[rank], num_shards=len(results))
        widest = max(b - a for a, b in pairwise(bounds))
        whole = replace(whole, shard_size=widest)
        try:
            results[rank] = run(_Shard(**vars(whole), rank=rank, exchange=exchange))
        except BaseException as error:
            results[rank] = error
            exchange.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
