"""Parameters of a model as places for the tensors of a checkpoint, with the parts that each
joins.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

# Built from the quantization config.
_NOT_STORED = ("input_scale_ub",)
# As compressed-tensors and modelopt call them.
_INPUT_SCALES = ("_input_global_scale", "_input_scale")
# Shapes of packed weights, of compressed-tensors: vLLM has one place for those of all parts, and
# does not use them.
UNUSED = "weight_shape"

# An expert of the model, and which of the matrices that a parameter joins; ``None`` for the whole
# parameter.
Part = tuple[int | None, Any]


@dataclass
class Place:
    """A parameter or buffer, and the tensors that were loaded into it.

    Attributes:
        name: Its name in the model.
        layer: The module that has it.
        end: Its name there.
        size: Number of values that a rank holds of it.
        tensors: Name and number of values of the tensor that was loaded, by part.
    """

    name: str
    layer: Any
    end: str
    size: int
    tensors: dict[Part, tuple[str, int]] = field(default_factory=dict)

    def expected_parts(self) -> list[Part]:
        """Return the parts that a checkpoint must have, as far as this rank holds them."""
        layer = self.layer
        if isinstance(layer, RoutedExperts):
            gated = ["w1", "w3"] if layer.moe_config.is_act_and_mul else ["w1"]
            matrices = gated if self.end.startswith("w13") else ["w2"]
            local = layer._map_global_expert_id_to_local_expert_id
            experts = [
                one for one in range(layer.moe_config.num_logical_experts) if local(one) >= 0
            ]
            return [(expert, matrix) for expert in experts for matrix in matrices]
        if isinstance(layer, QKVParallelLinear | MergedColumnParallelLinear):
            is_qkv = isinstance(layer, QKVParallelLinear)
            shards: list[Any] = ["q", "k", "v"] if is_qkv else [*range(len(layer.output_sizes))]
            # A file may hold all of them in one tensor, or some.
            if (None, None) in self.tensors:
                return []
            joined = {one for _, some in self.tensors if isinstance(some, tuple) for one in some}
            return [(None, one) for one in shards if one not in joined]
        return [] if self.tensors else [(None, None)]

    @property
    def is_required(self) -> bool:
        """True for a parameter that a checkpoint must have."""
        method = getattr(self.layer, "quant_method", None)
        return (
            self.end in self.layer._parameters
            and self.size > 0
            and self.end not in _NOT_STORED
            # vLLM makes them for experts even if activations are not quantised.
            and not (self.end.endswith(_INPUT_SCALES) and getattr(method, "use_a16", False))
            # vLLM makes them for experts in GPTQ, and takes them away where none was loaded.
            and not (
                isinstance(self.layer, RoutedExperts)
                and self.end.endswith("_bias")
                and not self.layer.moe_config.has_bias
            )
            # Scales of the cache are 1 without.
            and not isinstance(method, BaseKVCacheMethod)
        )

    def misfitting(self, num_ranks: int) -> tuple[list[str], int, int] | None:
        """Return the tensors of which vLLM took a piece, or which leave some of an expert empty.

        Args:
            num_ranks: Ranks of tensor parallelism.

        Returns:
            Their names, how many values they hold, and how many a rank has; ``None`` if all fit.
        """
        by_expert: defaultdict[int | None, list[tuple[str, int]]] = defaultdict(list)
        for (expert, _), tensor in self.tensors.items():
            by_expert[expert].append(tensor)
        is_routed = isinstance(self.layer, RoutedExperts)
        size = self.size // (self.layer.local_num_experts if is_routed else 1)
        if is_routed:
            # Without expert parallelism data-parallel engines share each expert too.
            num_ranks = self.layer.moe_config.tp_size
        for tensors in by_expert.values():
            num_values = sum(number for _, number in tensors)
            fits = num_values <= size * num_ranks
            if fits and is_routed and not self._is_padded():
                # Sharded over the ranks, or the same on each.
                fits = num_values % size == 0
            # Scales of one value are joined to their largest.
            if not fits and any(number > 1 for _, number in tensors):
                return [name for name, _ in tensors], num_values, size
        return None

    def _is_padded(self) -> bool:
        config = self.layer.moe_config
        own = config.hidden_dim, config.intermediate_size_per_partition
        stored = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
        # Scales of blocks are spread over finer ones.
        return (
            own != stored or getattr(getattr(self.layer, self.end), "quant_method", "") == "block"
        )

    def add(self, part: Part, name: str, loaded: Tensor) -> None:
        """Note that a tensor was loaded."""
        # vLLM's experts for layouts that Marlin does not take hold as bytes what is stored as
        # int32.
        is_repacked = (
            loaded.dtype == torch.int32 and getattr(self.layer, self.end).dtype == torch.uint8
        )
        self.tensors[part] = (name, loaded.numel() * (4 if is_repacked else 1))

    def values(self, param: Tensor, part: Part) -> Tensor:
        """Return a copy of what the place of a part holds, as bytes, which compare equal also where
        it is NaN.
        """
        held, (expert, _) = param.data, part
        if expert is not None and isinstance(self.layer, RoutedExperts):
            local = self.layer._map_global_expert_id_to_local_expert_id(expert)
            held = held[local] if local >= 0 else held
        return held.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
