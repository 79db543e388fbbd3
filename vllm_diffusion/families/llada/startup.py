"""LLaDA-8B and LLaDA-1.5: the whole sequence in both directions, the answer revealed block by block.

Source: ML-GSAI/LLaDA at b7e6c35, ``generate.py``, with its defaults: blocks of 128 in 128 steps, even counts of the
most probable tokens (``remasking="low_confidence"``, here ``strategy="static"``; ``"random"`` is ``"random"``). Blocks after the one that is
denoised are masks, and attended. It differs:

- Steps are those of a block; there they are those of the answer, divided by its blocks.
- An answer ends with the first end token of a finished block; there it goes on, and what follows the end token stays
  in the text. ``ignore_eos`` gives all of it.
- An answer is rounded up to whole blocks, of which the request gets its ``max_tokens``; there other
  lengths are refused. Where the model's length leaves no room for a block, the answer is one shorter block.
- Probabilities are float32; there they have the model's dtype, in which many are equal.
- The mask token is never drawn, and one in the prompt stays; among equally confident positions the leftmost
  comes first.
- ``cfg_scale``, ``logits_eos_inf`` and ``confidence_eos_eot_inf`` are left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import LlamaConfig

from vllm_diffusion.decoding.reveal_in_blocks import RevealInBlocks
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.whole_sequences import WholeSequenceEngineConfig
from vllm_diffusion.weights.tensor_rules import BodyTensors, TensorRules

# Of LLaDA and iLLaDA.
RULE = partial(
    RevealInBlocks, includes_threshold=True, at_request_temperature=False, spreads_masks=True
)
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
    "include_qkv_bias": "attention_bias",
}


class LLaDAConfig(LlamaConfig):
    """Llama's, by other names."""

    model_type = "llada"

    def __init__(self, **fields: Any) -> None:
        """Take the fields of ``config.json``."""
        super().__init__(**{_FIELDS.get(name, name): value for name, value in fields.items()})


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

    rules = {
        "reveal_in_blocks": PublishedRule(
            RULE,
            {
                "reveal_threshold": 0.9,
                "strategy": "static",
                "block_length": 128,
                "max_denoising_steps": 128,
            },
        )
    }
    mask_token_id = 126336
    block_length = 128

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        return _Tensors("LlamaForCausalLM")
