"""LLaDA2.0 and 2.1: blocks of 32, revealed by confidence; 2.1 also edits what it has revealed.

Blocks are counted from the start of the prompt and attend in both directions, the prompt's too. The
checkpoints of both have the same architecture and layout: 2.1's rule serves those whose name has
"LLaDA2.1", and any other with the setting ``rule``.

Source: ``modeling_llada2_moe.py`` of inclusionAI/LLaDA2.0-mini and LLaDA2.1-mini as found in public
copies. It differs:

- Temperature 0 takes the likeliest token at its plain probability; in 2.0's file it draws from the
  unscaled distribution.
- A finished block that has an end token ends the answer, which is cut there (``eos_early_stop`` of
  2.1; in 2.0 the default); 2.0's ``eos_early_stop`` is the setting ``converge_at_end``.
- The mask token is never drawn, and among equally confident positions the leftmost comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.decoding.reveal_and_edit import RevealAndEdit
from vllm_diffusion.quantization.tensor_rules import Shape, TensorRules
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_engine_config import MaskedEngineConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class LLaDA2MoeConfig(PretrainedConfig):
    """What ``config.json`` says, and what the published code takes for granted."""

    model_type = "llada2_moe"

    def __init__(self, rope_theta: float = 600000.0, **fields: Any) -> None:
        """Take the fields of ``config.json``."""
        super().__init__(**({"use_qk_norm": True, "partial_rotary_factor": 0.5} | fields))
        if getattr(self, "rope_parameters", None) is None:
            self.rope_parameters: dict[str, Any] = {
                "rope_type": "default",
                "rope_theta": rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            }


class LLaDA2EngineConfig(MaskedEngineConfig):
    """The entry of ``LLaDA2MoeModelLM``."""

    rules = {
        "reveal": PublishedRule(Reveal, {"reveal_threshold": 0.95, "strategy": "dynamic"}),
        "reveal_and_edit": PublishedRule(
            RevealAndEdit,
            {
                "reveal_threshold": 0.95,
                "strategy": "dynamic",
                "editing_threshold": 0.9,
                "max_post_steps": 16,
                # A mask a step, and the steps after them.
                "max_denoising_steps": 48,
            },
        ),
    }
    mask_token_id = 156895
    block_length = 32

    @classmethod
    def default_rule(cls, model_config: ModelConfig) -> str:
        return "reveal_and_edit" if "llada2.1" in str(model_config.model).lower() else "reveal"

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        super().check_model(model_config)
        if getattr(model_config.hf_config, "expert_capacity", None) is not None:
            raise ValueError(
                "The checkpoint routes experts by block (expert_capacity, LLaDA2.2), which is not "
                "implemented; serve LLaDA2.0 or LLaDA2.1."
            )

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        return LLaDA2Tensors()


class LLaDA2Tensors(TensorRules):
    """Names and shapes as published; experts fused here, and one by one in the files."""

    unquantised = ("word_embeddings.weight", "mlp.gate.weight")

    def shapes(self, config: Any) -> dict[str, Shape]:
        hidden, head_dim = config.hidden_size, config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        shapes: dict[str, Shape] = {
            "model.word_embeddings.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            qkv = (num_heads + 2 * num_kv_heads) * head_dim
            shapes |= {
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "post_attention_layernorm.weight": (hidden,),
                prefix + "attention.query_key_value.weight": (qkv, hidden),
                prefix + "attention.query_layernorm.weight": (head_dim,),
                prefix + "attention.key_layernorm.weight": (head_dim,),
                prefix + "attention.dense.weight": (hidden, num_heads * head_dim),
            }
            shapes |= self._mlp(config, prefix + "mlp.", layer < config.first_k_dense_replace)
        return shapes

    def _mlp(self, config: Any, prefix: str, is_dense: bool) -> dict[str, Shape]:
        hidden, num_experts = config.hidden_size, config.num_experts

        def gated(stem: str, size: int) -> dict[str, Shape]:
            return {
                stem + "gate_proj.weight": (size, hidden),
                stem + "up_proj.weight": (size, hidden),
                stem + "down_proj.weight": (hidden, size),
            }

        if is_dense:
            return gated(prefix, config.intermediate_size)
        size = config.moe_intermediate_size
        return {
            prefix + "gate.weight": (num_experts, hidden),
            prefix + "gate.expert_bias": (num_experts,),
            prefix + "experts.gate_up_proj": (num_experts, 2 * size, hidden),
            prefix + "experts.down_proj": (num_experts, hidden, size),
            **gated(prefix + "shared_experts.", size * config.num_shared_experts),
        }
