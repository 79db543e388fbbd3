"""Output heads without a model, whole and in tensor-parallel parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import HashStore, ProcessGroupGloo

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


class _Ranks:
    """Ranks that are threads, with gloo between them as between the processes of a server.

    Collectives read and write memory in its order, whatever a tensor's strides say.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.store = HashStore()
        self.of_thread = threading.local()

    def join(self, rank: int) -> None:
        """Called by the rank's thread."""
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=120)
        self.of_thread.group = ProcessGroupGloo(self.store, rank, self.num_shards, options)

    def all_reduce(self, values: Tensor) -> Tensor:
        self.of_thread.group.allreduce([values]).wait()
        return values

    def all_gather(self, values: Tensor, dim: int) -> Tensor:
        assert dim == 0
        gathered = values.new_empty(self.num_shards * values.shape[0], *values.shape[1:])
        self.of_thread.group._allgather_base(gathered, values).wait()
        return gathered


def on_shards(
    weight: Tensor, borders: list[int], softcap: float | None, run: Callable[[OutputHead], Any]
) -> list[Any]:
    """What ``run`` returns on each rank when the ids are cut at ``borders``."""
    bounds = [0, *borders, weight.shape[0]]
    results: list[Any] = [None] * (len(bounds) - 1)
    ranks = _Ranks(len(results))

    def work(rank: int) -> None:
        part = weight[bounds[rank] : bounds[rank + 1]]
        widest = max(b - a for a, b in pairwise(bounds))
        head = output_head(
            part, softcap, first_id=bounds[rank], num_shards=len(results), shard_size=widest
        )
        try:
            ranks.join(rank)
            results[rank] = run(head)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(results))]
    with mock.patch.multiple(
        "vllm_diffusion.sampling.output_head",
        tensor_model_parallel_all_reduce=ranks.all_reduce,
        tensor_model_parallel_all_gather=ranks.all_gather,
    ):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
