"""LLaDA-8B, LLaDA-1.5, LLaDA-MoE: the whole sequence in both directions, the answer revealed block
by block.

Source: ML-GSAI/LLaDA at b7e6c35, ``generate.py``, with its defaults: blocks of 128 in 128 steps,
even counts of the most probable tokens (``remasking="low_confidence"``, here ``strategy="static"``;
``"random"`` is ``"random"``). Blocks after the one that is denoised are masks, and attended. It
differs:

- Steps are those of a block; there they are those of the answer, divided by its blocks.
- An answer ends with the first end token of a finished block; there it goes on, and what follows
  the end token stays in the text. ``ignore_eos`` gives all of it.
- An answer is rounded up to whole blocks, of which the request gets its ``max_tokens``; there other
  lengths are refused. Where the model's length leaves no room for whole blocks, the masks are
  ``max_tokens`` and the last block is the shorter one.
- Probabilities are float32; there they have the model's dtype, in which many are equal.
- The mask token is never drawn, and one in the prompt stays; among equally confident positions the
  leftmost comes first.
- ``cfg_scale`` is left out.

LLaDA-MoE has the same loop; ``logits_eos_inf`` and ``confidence_eos_eot_inf`` name tokens of
LLaDA-8B's vocabulary there, and are left out. Its layers, by ``modeling_lladamoe.py`` as
ZHZisZZ/dllm has it at ca17675, are a Qwen3-MoE's, but weights of experts are not normalised,
whatever ``norm_topk_prob`` is in ``config.json``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import LlamaConfig, Qwen3MoeConfig

from vllm_diffusion.decoding.layouts import SequenceOfBlocks
from vllm_diffusion.decoding.reveal import AS_LLADA
from vllm_diffusion.decoding.reveal_in_blocks import RevealEndsLast, RevealInBlocks
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.whole_sequences import WholeSequenceEngineConfig
from vllm_diffusion.weights.checkpoint_tensors import BodyTensors

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from vllm_diffusion.startup.plugin_settings import PluginSettings

# The loop's own; ``config.json`` has the first one too.
_ENDS = {"end_token_id": 126081, "turn_end_token_id": 126348}
# Names of a Llama's modules, to the published ones.
MODULES = {
    "lm_head": "model.transformer.ff_out",
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "model.layers": "model.transformer.blocks",
}
# The same, within a layer.
IN_LAYERS = {
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
}
# Names in ``config.json`` of what a Llama has under other ones.
_FIELDS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "activation_type": "hidden_act",
    "weight_tying": "tie_word_embeddings",
}

# Fields of ``config.json`` of LLaDA that change its layers, with the value that a Llama's layers
# have. A field may be left out or null too.
_SERVED: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "clip_qkv": None,
    "embedding_layer_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "norm_after": False,
    "rope": True,
    "scale_logits": False,
}

# Fields of ``config.json`` of LLaDA-MoE whose layers vLLM's class does not have, with the values
# that mean none.
_WITHOUT: dict[str, tuple[Any, ...]] = {
    "shared_expert_intermediate_size": (None, 0, -1),
    "moe_router_enable_expert_bias": (None, False),
    "clip_qkv": (None,),
    "partial_rotary_factor": (None, 1, -1),
}


def even_blocks(rule: type[RevealInBlocks], block_length: int, **options: Any) -> PublishedRule:
    """The rule of LLaDA's loop, with as many steps for a block as it has positions.

    Args:
        rule: Class of the rule.
        block_length: Positions of a block.
        options: Others than LLaDA's own.
    """
    return PublishedRule(
        partial(rule, **AS_LLADA, **options),
        {
            "reveal_threshold": 0.9,
            "strategy": "static",
            "block_length": block_length,
            "max_denoising_steps": block_length,
        },
    )


class LLaDAMoEConfig(Qwen3MoeConfig):
    """Qwen3-MoE's, by other names."""

    model_type = "lladamoe"

    def __init__(
        self,
        expert_intermediate_size: int = 1024,
        dense_intermediate_size: int = 8192,
        moe_layer_freq: tuple[int, ...] | list[int] = (),
        **fields: Any,
    ) -> None:
        """Take the fields of ``config.json``."""
        # Saved again, a configuration has Qwen3-MoE's names too.
        own = {
            "moe_intermediate_size": expert_intermediate_size,
            "intermediate_size": dense_intermediate_size,
            "mlp_only_layers": [i for i, is_sparse in enumerate(moe_layer_freq) if not is_sparse],
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "head_dim": fields.get("hidden_size", 2048) // fields.get("num_attention_heads", 16),
        }
        self.not_served = {
            name: fields.pop(name)
            for name, none in _WITHOUT.items()
            if fields.get(name) not in none
        }
        if not fields.get("qk_layernorm", True):
            self.not_served["qk_layernorm"] = False
        rest = {name: value for name, value in fields.items() if name not in _WITHOUT}
        super().__init__(**(rest | own))


class LLaDAConfig(LlamaConfig):
    """Llama's, by other names."""

    model_type = "llada"

    def __init__(self, **fields: Any) -> None:
        """Take the fields of ``config.json``."""
        super().__init__(**{_FIELDS.get(name, name): value for name, value in fields.items()})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make LLaDA-MoE's of a file that has its fields with this ``model_type``, as one copy
        has.
        """
        if "num_experts" in config_dict:
            return LLaDAMoEConfig.from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)


class _Tensors(BodyTensors):
    """A Llama's tensors, by the published names."""

    unquantised = (*BodyTensors.unquantised, "wte.weight")

    def _published(self, name: str) -> str:
        for own, published in IN_LAYERS.items():
            name = name.replace(f".{own}.", f".{published}.")
        for own, published in MODULES.items():
            if name.startswith(f"{own}."):
                return published + name.removeprefix(own)
        return name


class LLaDAEngineConfig(WholeSequenceEngineConfig):
    """The entry of ``LLaDAModelLM``."""

    rules = {"reveal_in_blocks": even_blocks(RevealEndsLast, 128, **_ENDS)}
    tensors = _Tensors("LlamaForCausalLM")
    mask_token_id = 126336
    block_length = 128
    layout = SequenceOfBlocks

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        super().check_model(model_config)
        config = model_config.hf_config
        # The file's embedding has a row for each id. One key head may be written as
        # multi_query_attention too.
        served = _SERVED | {"embedding_size": config.vocab_size}
        if config.num_key_value_heads != 1:
            served["multi_query_attention"] = False
        for name, wanted in served.items():
            value = getattr(config, _FIELDS.get(name, name), None)
            if value not in (None, wanted):
                of_vocabulary = ", its vocab_size" if name == "embedding_size" else ""
                raise ValueError(
                    f"{name}={value!r} in config.json asks for layers that are not supported; published LLaDAs "
                    f"have {name}={wanted!r}{of_vocabulary}."
                )

    @classmethod
    def published_rule(cls, model_config: ModelConfig, settings: PluginSettings) -> PublishedRule:
        published, config = super().published_rule(model_config, settings), model_config.hf_config
        ends = {
            "end_token_id": config.eos_token_id,
            "turn_end_token_id": getattr(config, "eot_token_id", None),
        }
        of_checkpoint = {name: token for name, token in ends.items() if isinstance(token, int)}
        return replace(published, rule=partial(published.rule, **of_checkpoint))


class LLaDAMoEEngineConfig(WholeSequenceEngineConfig):
    """The entry of ``LLaDAMoEModelLM``."""

    rules = {"reveal_in_blocks": even_blocks(RevealInBlocks, 128)}
    body = "Qwen3MoeForCausalLM"
    mask_token_id = 156895
    block_length = 128
    layout = SequenceOfBlocks

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        super().check_model(model_config)
        for name, value in model_config.hf_config.not_served.items():
            raise ValueError(
                f"{name}={value!r} in config.json asks for layers that are not supported; the published "
                "LLaDA-MoE has none."
            )
