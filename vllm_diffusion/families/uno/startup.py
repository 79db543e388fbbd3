"""Uno: an autoregressive model that drafts for itself with a LoRA, and answers as without it.

The draft's pass is causal: the last token, whose row has the plain weights, then random tokens,
whose rows have the LoRA; each row predicts the token after it. So the first row's token is as
without a draft, and certain. A second pass, with the plain weights, draws a token in each row of
the draft; drafted ones are kept up to the first that differs. Both passes draw with the same noise,
that of the token's position: the tokens are those of drawing one after another, seed by seed.

The adapter is a folder of PEFT's: ``adapter`` next to the weights (s-sahoo/uno-qwen3-8B, whose
``config.json`` has SDAR's class), or the setting ``draft_adapter``, as for K2-Horizon, whose
adapters have repositories of their own.

Source: ``nano_vllm_uno/engine/two_pass_decoding.py`` and ``noise.py`` of ifm-ai/uno at 9018a5d, the
linear sampler. It differs:

- There a draft is kept with probability ``p / q``, which gives the same law and other tokens.
- The second pass has a row more, of the last token, whose keys and values it writes once more; the
  first has one more random token, which nothing reads.
- The tree sampler is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import CausalDraft
from vllm_diffusion.decoding.reveal import LinearSpec
from vllm_diffusion.decoding.rule import INT32_MAX, Setting
from vllm_diffusion.startup.draft_lora import (
    DraftLora,
    log_drafts,
    look_for_draft_lora,
    verifies_drafts,
)
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_models import MaskedEngineConfig
from vllm_diffusion.startup.plugin_settings import OPTION, PluginSettings
from vllm_diffusion.weights.adapters.support import adapted_modules
from vllm_diffusion.weights.checkpoint_tensors import CheckpointTensors, Shape

if TYPE_CHECKING:
    from vllm.config import DiffusionConfig, ModelConfig, VllmConfig

FOLDER = "adapter"
# More positions than any publisher's draft has.
_MOST_POSITIONS = 64


class UnoEngineConfig(MaskedEngineConfig):
    """The entry of ``UnoQwen3ForCausalLM``."""

    has_autoregressive_mode = True
    mask_token_id = 151669
    # The published sampler's default: 8 tokens after the certain one.
    block_length = 9
    layout = CausalDraft
    rules = {
        "linear_spec": PublishedRule(lambda mask_token_id: LinearSpec(), draft_length=block_length)
    }
    body = "Qwen3ForCausalLM"

    @classmethod
    def find_draft_lora(cls, model_config: ModelConfig) -> DraftLora:
        """Return the adapter of drafts.

        Raises:
            ValueError: If there is none, or it is not one for this model.
        """
        modules = adapted_modules(cls.checkpoint_tensors(), model_config.hf_config)
        lora = look_for_draft_lora(model_config, FOLDER, modules)
        if lora is None:
            raise ValueError(
                f"{model_config.model} has no {FOLDER}/adapter_config.json, the LoRA with which Uno drafts; name its "
                f'folder or repository in {OPTION} with "draft_adapter", or serve the model without drafts with '
                '"rule": "autoregressive".'
            )
        return lora

    @classmethod
    def named_length(cls, model_config: ModelConfig) -> tuple[int, str | None]:
        """Return the most positions of a draft, which no file names."""
        return _MOST_POSITIONS, None

    @classmethod
    def apply_stock_defaults(cls, vllm_config: VllmConfig) -> None:
        # Not the masked families' line on the length of blocks: there are none.
        super(MaskedEngineConfig, cls).apply_stock_defaults(vllm_config)

    @classmethod
    def canvas_spec(
        cls, model_config: ModelConfig, settings: PluginSettings, canvases: DiffusionConfig
    ) -> CanvasSpec:
        spec = super().canvas_spec(model_config, settings, canvases)
        mask = spec.mask_token_id
        if not Setting(int, 2, INT32_MAX).allows(mask):
            raise ValueError(
                f"mask_token_id={mask!r} in config.json of the checkpoint must be an integer of at least 2: drafts "
                "start from random tokens before it; correct it, or leave it out."
            )
        # As in training, without the first id.
        noise = range(1, min(mask, model_config.get_vocab_size()))
        return replace(spec, mask_token_id=None, noise_tokens=noise)

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().verify_and_update_config(vllm_config)
        # The workers find it again, and put it on the layers.
        if verifies_drafts(vllm_config.model_config):
            lora = cls.find_draft_lora(vllm_config.model_config)
            log_drafts(vllm_config.model_config, lora, FOLDER)


class K2HorizonTensors(CheckpointTensors):
    """Matrices of the layers of a dense K2-Horizon, whose class ``transformers`` does not have."""

    def shapes(self, config: Any) -> dict[str, Shape]:
        hidden, inner = config.hidden_size, config.intermediate_size
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        of_layer = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        return {
            f"model.layers.{i}.{name}.weight": shape
            for i in range(config.num_hidden_layers)
            for name, shape in of_layer.items()
        }


class UnoK2HorizonEngineConfig(UnoEngineConfig):
    """The entry of ``UnoK2HorizonForCausalLM``, the dense bodies of K2-Horizon."""

    # The vocabulary of the 7B; the 0.9B's is smaller. Their config.json has no mask token, and the
    # publisher draws from the whole vocabulary.
    mask_token_id = 250624
    tensors = K2HorizonTensors()

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        config = vllm_config.model_config.hf_text_config
        for name in ("num_experts", "attention_gate_func"):
            if value := getattr(config, name, None):
                raise ValueError(
                    f"{name}={value!r} in config.json of the checkpoint: Uno's adapters are for K2-Horizon's dense "
                    "models without a gate (0.9B, 7B); serve this one without drafts, by leaving out "
                    "UnoK2HorizonForCausalLM in --hf-overrides."
                )
        rotated = config.rope_head_dim or config.head_dim
        if vllm_config.lora_config is not None and rotated < config.head_dim:
            # vLLM permutes heads of queries and keys as it loads them, but not those of adapters.
            raise ValueError(
                f"--enable-lora is not supported with rope_head_dim={rotated} below head_dim={config.head_dim} in "
                "config.json of the checkpoint, where vLLM adds adapters to the wrong channels; leave it out, or "
                "merge the adapter into the checkpoint."
            )
        super().verify_and_update_config(vllm_config)
