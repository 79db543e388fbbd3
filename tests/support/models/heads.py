"""Output heads without a model, whole and in tensor-parallel parts."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.engines.ranks import ThreadRanks
from vllm_diffusion.sampling.output_head import OutputHead


def output_head(weight: Tensor, softcap: float | None = None, **changes: Any) -> OutputHead:
    """Return a head whose embedding is its weight."""
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
    """Return a head whose rows are their own logits."""
    return output_head(torch.eye(vocab_size))


def on_shards(
    weight: Tensor, borders: list[int], softcap: float | None, run: Callable[[OutputHead], Any]
) -> list[Any]:
    """Return the result of ``run`` on each rank when the ids are cut at ``borders``."""
    bounds = list(pairwise([0, *borders, weight.shape[0]]))
    ranks = ThreadRanks(len(bounds))

    def work(rank: int) -> Any:
        first, last = bounds[rank]
        return run(
            output_head(
                weight[first:last],
                softcap,
                first_id=first,
                num_shards=len(bounds),
                shard_size=max(b - a for a, b in bounds),
            )
        )

    with mock.patch.multiple(
        "vllm_diffusion.sampling.output_head",
        tensor_model_parallel_all_reduce=ranks.all_reduce,
        tensor_model_parallel_all_gather=ranks.all_gather,
    ):
        return ranks.run(work)
