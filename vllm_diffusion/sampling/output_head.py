"""The projection onto the vocabulary, as the sampler reads it: a tile of ids at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

# The logit of an id that is never drawn: below any other at every temperature, and finite after the
# division by the lowest, so that no difference of two of them is undefined.
_NEVER = -1e30
# Ids whose weights are converted to the dtype of the logits at the same time.
_CONVERTED_AT_ONCE = 4096


@dataclass(frozen=True)
class OutputHead:
    """The ids of one tensor-parallel rank.

    Attributes:
        weight: [num_ids, hidden_size], the rank's rows of the projection.
        embedding: [num_ids, hidden_size], token embeddings of the same ids, for a model with
            self-conditioning; ``None`` for one without.
        first_id: The rank's first id.
        softcap: Logits become ``softcap * tanh(logit / softcap)``; ``None`` leaves them.
        dtype: Logits are computed and rounded in it.
        matmul: (rows [num_rows, k], weight [n, k]) -> [num_rows, n], as the platform multiplies.
        num_shards: Ranks that share the vocabulary.
        shard_size: Ids of the largest of them.
        never_drawn: Ids of the whole vocabulary whose logits :meth:`project` overwrites with the
            lowest that ``dtype`` has, or -1e30: a mask token, which no answer may hold. In float16,
            which ends at -65504, that is low enough up to a temperature of 1000.
    """

    weight: Tensor
    embedding: Tensor | None
    first_id: int
    softcap: float | None
    dtype: torch.dtype
    matmul: Callable[[Tensor, Tensor], Tensor]
    num_shards: int
    shard_size: int
    never_drawn: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.never_drawn and self.softcap is not None:
            raise ValueError(
                f"softcap={self.softcap} would bring the logits of never_drawn={self.never_drawn} "
                "back among the others."
            )

    @staticmethod
    def of(
        lm_head: VocabParallelEmbedding,
        embedding: VocabParallelEmbedding | None,
        *,
        softcap: float | None,
        dtype: torch.dtype | None,
        never_drawn: tuple[int, ...] = (),
    ) -> OutputHead:
        """Make the head of a model's layers.

        Raises:
            ValueError: If the head is quantised, which no tile can be cut from, or if some ids are
                never drawn and there is a cap.
        """
        # The second is what modelopt gives a head that it leaves alone.
        unquantized = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
        if not isinstance(lm_head.quant_method, unquantized):
            raise ValueError(
                f"The checkpoint's lm_head is quantised ({type(lm_head.quant_method).__name__}), "
                "and the sampler reads it a tile of the vocabulary at a time; add lm_head to the "
                "ignore list of its quantization_config and keep its weights in bfloat16."
            )
        shard = lm_head.shard_indices
        num_ids = shard.org_vocab_end_index - shard.org_vocab_start_index

        def matmul(rows: Tensor, weight: Tensor) -> Tensor:
            # vLLM's own path for the whole head, also where it promises batch invariance.
            layer = SimpleNamespace(weight=weight, cpu_linear=getattr(lm_head, "cpu_linear", None))
            product: Tensor = lm_head.quant_method.apply(layer, rows)
            return product

        return OutputHead(
            weight=lm_head.weight[:num_ids],
            embedding=None if embedding is None else embedding.weight[:num_ids],
            first_id=shard.org_vocab_start_index,
            softcap=softcap,
            dtype=dtype or lm_head.weight.dtype,
            matmul=matmul,
            num_shards=get_tensor_model_parallel_world_size(),
            shard_size=lm_head.num_embeddings_per_partition,
            never_drawn=never_drawn,
        )

    def tiles(self, size: int, ids: Iterable[int] | None = None) -> Iterator[slice]:
        """The rank's ids, counted from its first, in pieces of at most ``size``: those that hold
        one of ``ids``.
        """
        starts: Iterable[int] = range(0, self.weight.shape[0], size)
        if ids is not None:
            held = {(token - self.first_id) // size * size for token in ids}
            starts = filter(held.__contains__, starts)
        for start in starts:
            yield slice(start, min(start + size, self.weight.shape[0]))

    def project(self, rows: Tensor, tile: slice) -> Tensor:
        """Logits before the cap: [num_rows, tile ids], in ``dtype``."""
        weight = self.weight[tile]
        logits = self.matmul(rows.to(self.dtype), weight.to(self.dtype))
        for token in self.never_drawn:
            column = token - self.first_id - tile.start
            # Known on the host: an index would have to be copied to the device.
            if 0 <= column < logits.shape[1]:
                logits[:, column].fill_(max(_NEVER, torch.finfo(logits.dtype).min))
        return logits

    def project_all(self, rows: Tensor, ids: Iterable[int] | None = None) -> Tensor:
        """Logits of all of the rank's ids before the cap: [num_rows, num_ids], in ``dtype``.

        Args:
            rows: [num_rows, hidden_size].
            ids: The only ones whose logits are needed, of all ranks; others may be 0. ``None`` for
                all.
        """
        num_ids = len(self.weight)
        if ids is None and self.weight.dtype == self.dtype:
            return self.project(rows, slice(0, num_ids))
        # Not the whole weight in another dtype at once.
        new = torch.empty if ids is None else torch.zeros
        projected = new(len(rows), num_ids, dtype=self.dtype, device=rows.device)
        for tile in self.tiles(_CONVERTED_AT_ONCE, ids):
            projected[:, tile] = self.project(rows, tile)
        return projected

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's ``values``: [num_shards, ...], ascending in ids."""
        if self.num_shards == 1:
            return values[None]
        return tensor_model_parallel_all_gather(values[None].contiguous(), dim=0)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks; ``values`` may be lost."""
        if self.num_shards == 1:
            return values
        # gloo adds up as much memory as there are elements, from the first on: of a view with gaps
        # the last rows would stay this rank's own.
        return tensor_model_parallel_all_reduce(values.contiguous())


def head_of(
    model: nn.Module,
    *,
    never_drawn: tuple[int, ...] = (),
) -> OutputHead:
    """Make the head of a vLLM language model whose head and logits are where most have them.

    Args:
        model: The model.
        never_drawn: See :class:`OutputHead`.

    Raises:
        ValueError: If the model scales its logits, or as :meth:`OutputHead.of`.
    """
    logits_processor: Any = model.logits_processor
    if logits_processor.scale != 1.0:
        raise ValueError(f"{type(model).__name__} scales its logits, which is not supported.")
    return OutputHead.of(
        model.lm_head,
        None,
        softcap=logits_processor.soft_cap,
        dtype=logits_processor.head_dtype,
        never_drawn=never_drawn,
    )
