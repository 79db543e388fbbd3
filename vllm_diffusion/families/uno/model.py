"""Uno on vLLM's Qwen3 and K2-Horizon, with the LoRA of its drafts."""

from torch import Tensor
from vllm.model_executor.models.k2_horizon import K2HorizonForCausalLM, _rope_weight_perm
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from vllm_diffusion.families.uno.startup import UnoEngineConfig, UnoK2HorizonEngineConfig
from vllm_diffusion.runner.adapted_drafts import AdaptedDraftModel


class UnoQwen3ForCausalLM(AdaptedDraftModel, Qwen3ForCausalLM):
    """Qwen3-8B."""

    find_draft_lora = staticmethod(UnoEngineConfig.find_draft_lora)


class UnoK2HorizonForCausalLM(AdaptedDraftModel, K2HorizonForCausalLM):
    """K2-Horizon-0.9B and -7B."""

    find_draft_lora = staticmethod(UnoK2HorizonEngineConfig.find_draft_lora)
    # vLLM's class names the second one only where some layers have experts.
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def loaded_rows(self, module: str, rows: Tensor) -> Tensor:
        """Permute heads of queries and keys as vLLM's class permutes them in the weights: where
        only a part of each head is rotated, that part comes first.
        """
        stem, _, last = module.rpartition(".")
        attention = self.get_submodule(stem)
        if last not in ("q_proj", "k_proj") or not attention.fold_rope_weights:
            return rows
        order = _rope_weight_perm(attention.head_dim, attention.rope_head_dim)
        heads = rows.view(-1, attention.head_dim, rows.shape[-1])
        return heads[:, order].reshape(rows.shape)
