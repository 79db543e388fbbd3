"""LLaDA2 on vLLM's Bailing: the same layers and weight names; 2.2's experts are chosen by block."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.runner.masked_model import MaskedModel
from vllm_diffusion.startup.plan import spec_of


@replaces_call(
    "vllm.model_executor.models.bailing_moe:FusedMoEFactory",
    reason="These layers hand their experts no router, and LLaDA2.2's are chosen by block.",
    until="BailingMoE takes the class of its experts or a router as an argument.",
)
def _routing_by_block(stock: Callable[..., Any], **arguments: Any) -> Any:
    model_config = get_current_vllm_config().model_config
    capacity = getattr(model_config.hf_config, "expert_capacity", None)
    if capacity is None or spec_of(model_config) is None:
        return stock(**arguments)
    router = BlockRouter(
        arguments["top_k"],
        arguments["num_experts"],
        capacity=capacity,
        block_length=model_config.hf_config.canvas_length,
        bias=arguments["e_score_correction_bias"],
        scaling_factor=arguments["routed_scaling_factor"],
    )
    # The groups are in the checkpoint's configuration, and mean nothing there.
    groups = {"use_grouped_topk": False, "num_expert_group": None, "topk_group": None}
    return stock(**(arguments | groups | {"router": router}))


class BlockRouter(BaseRouter):
    """The best experts of each block, and of these the best of each token.

    An expert is as good for a block as for the token that it is best for; scores are sigmoids with
    a bias, weights are without it. Every request's rows in a pass are whole blocks, so that the
    rows of a pass are cut every ``block_length``; what follows the last request's is padding, in
    blocks of its own.

    Source: the description of ``LLaDA2MoeGate.block_routing`` of inclusionAI/LLaDA2.2-flash in
    FLX-OSS/FluxServe, at 5dcf8a8.
    """

    def __init__(
        self,
        top_k: int,
        num_experts: int,
        *,
        capacity: int,
        block_length: int,
        bias: Tensor,
        scaling_factor: float,
    ) -> None:
        """Make the router of a layer.

        Args:
            top_k: Number of experts per token.
            num_experts: Number of experts of the layer.
            capacity: Number of experts per block.
            block_length: Tokens of a block.
            bias: [num_experts], float32: added to the scores by which experts are chosen.
            scaling_factor: Sum of a token's weights.
        """
        super().__init__(top_k=top_k, global_num_experts=num_experts)
        self.capacity = capacity
        self.block_length = block_length
        self.bias = bias
        self.scaling_factor = scaling_factor

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """One that no kernel has."""
        return RoutingMethodType.Custom

    @property
    def supports_monolithic_kernels(self) -> bool:
        """Return false: monolithic kernels route by themselves."""
        return False

    def _compute_routing(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        scores = router_logits.float().sigmoid()
        allowed = self._allowed(scores + self.bias)
        chosen = (scores + self.bias).masked_fill(~allowed, float("-inf")).topk(self.top_k).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * self.scaling_factor
        return weights, chosen.to(torch.int32 if indices_type is None else indices_type)

    def _allowed(self, biased: Tensor) -> Tensor:
        """[num_rows, num_experts], bool: those of each row's block.

        Args:
            biased: [num_rows, num_experts], float32.
        """
        num_rows, num_experts = biased.shape
        # A pass of whole blocks adds nothing; those in which vLLM measures memory may not be.
        rest = -num_rows % self.block_length
        padded = F.pad(biased, (0, 0, 0, rest), value=float("-inf"))
        best = padded.view(-1, self.block_length, num_experts).amax(dim=1)
        experts = best.topk(self.capacity).indices
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, experts, True)
        return allowed.repeat_interleave(self.block_length, dim=0)[:num_rows]


class _StackedExperts(BailingMoeV2ForCausalLM):
    """The layers, from files with one tensor per expert or with one for all experts of a layer."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load them as vLLM's class does, after stacked tensors were taken apart."""
        return super().load_weights(_one_by_one(weights))


def _one_by_one(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield stacked experts as the publisher's files name them, one by one.

    Source: inclusionAI/dFactory at c29d72c, ``scripts/moe_convertor.py``, whose trainer stacks the
    matrices [num_experts, out_features, in_features] as ``experts.gate_proj``.
    """
    for name, tensor in weights:
        start, separator, matrix = name.rpartition(".mlp.experts.")
        if separator and matrix in ("gate_proj", "up_proj", "down_proj"):
            for i in range(len(tensor)):
                yield f"{start}{separator}{i}.{matrix}.weight", tensor[i]
        else:
            yield name, tensor


class LLaDA2MoeModelLM(MaskedModel, _StackedExperts):
    """LLaDA2.0, 2.1 and 2.2, mini and flash."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # What routes must be known when experts are made: it decides which kernels may serve them.
        _routing_by_block.install()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
