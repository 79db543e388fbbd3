"""Nemotron-Labs-Diffusion: blocks of 32 after a causal context; drafts of 32; one token after
another.

A block starts where the known tokens end. Its first token comes from the causal pass that writes
their keys and values: over the prompt, then over each finished block. The others start as masks,
and are revealed by the model's own probability, whatever the temperature. A block ends early at an
end token with no mask before it.

With the rule ``linear_spec`` a block is a draft after its first token, and the causal pass keeps
what it agrees with (``decoding/reveal.py``); the adapter ``linear_spec_lora``, a folder of PEFT's
next to the weights that adapts each layer's ``o_proj``, acts on the draft. With ``autoregressive``
vLLM serves an ordinary causal model.

Source: ``modeling_nemotron_labs_diffusion.py`` of nvidia/Nemotron-Labs-Diffusion, as found in
public copies; mlx-vlm's ``models/nemotron_labs_diffusion`` at 9b13f522 does the same. It differs:

- Steps of a block may be fewer than it is long: its masks are then spread over them as that code
  spreads them over the block's length, ``dynamic`` reveals no fewer, and none is left masked.
- In blocks the mask token is never drawn, and among equally confident positions the leftmost comes
  first.
- ``linear_spec_generate`` drafts in one step (``threshold=0``, as published); the mask token is
  drawn there, and in the autoregressive mode, if the model says it.
- ``causal_context=False`` and the thinking budget are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from transformers import Ministral3Config

from vllm_diffusion.decoding.layouts import FirstTokenBlock, VerifiedDraft
from vllm_diffusion.decoding.reveal import AS_LLADA, LinearSpec, Reveal
from vllm_diffusion.decoding.rule import AUTOREGRESSIVE, FLOAT32_MAX, Setting
from vllm_diffusion.startup.draft_lora import (
    DraftLora,
    log_drafts,
    look_for_draft_lora,
    verifies_drafts,
)
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_models import MaskedEngineConfig
from vllm_diffusion.startup.plugin_settings import OPTION
from vllm_diffusion.weights.adapters.support import Module
from vllm_diffusion.weights.checkpoint_tensors import BodyTensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, VllmConfig


logger = logging.getLogger("vllm.vllm_diffusion")

FOLDER = "linear_spec_lora"


def find_draft_lora(model_config: ModelConfig) -> DraftLora | None:
    """The adapter of drafts, on each layer's ``o_proj``; ``None`` if there is none."""
    config = model_config.hf_config
    module = Module(config.hidden_size, config.num_attention_heads * config.head_dim)
    names = (f"encoder.layers.{i}.self_attn.o_proj" for i in range(config.num_hidden_layers))
    return look_for_draft_lora(model_config, FOLDER, dict.fromkeys(names, module), adapts_all=True)


class NemotronLabsDiffusionConfig(Ministral3Config):
    """Ministral 3's, by another name."""

    model_type = "nemotron_labs_diffusion"


class NemotronLabsDiffusionEngineConfig(MaskedEngineConfig):
    """The entry of ``NemotronLabsDiffusionModel``."""

    # As on the card; without a threshold one token a step is the strategy "static".
    rules = {
        "reveal": PublishedRule(
            partial(Reveal, **AS_LLADA, judges_to_end=True),
            {"reveal_threshold": 0.9, "strategy": "dynamic"},
        ),
        "linear_spec": PublishedRule(lambda mask_token_id: LinearSpec(), layout=VerifiedDraft),
    }
    has_autoregressive_mode = True
    mask_token_id = 100
    block_length = 32
    layout = FirstTokenBlock
    tensors = BodyTensors(
        "Ministral3ForCausalLM", {"model.": "encoder.", "lm_head.": "diffusion_head."}
    )

    @classmethod
    def default_rule(cls, model_config: ModelConfig) -> str:
        """Return the rule of weights by ``dlm_paradigm``, the attention that they were trained
        with. Blocks of ``"autoregressive"`` were never seen to be right; the published methods do
        not look at it.
        """
        if getattr(model_config.hf_config, "dlm_paradigm", None) == AUTOREGRESSIVE:
            return AUTOREGRESSIVE
        return super().default_rule(model_config)

    @classmethod
    def has_window(cls, config: PretrainedConfig) -> bool:
        """Tell whether the layers have a window: those of Ministral 3 have no flag beside it."""
        return config.sliding_window is not None

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        super().check_model(model_config)
        rope = getattr(model_config.hf_config, "rope_parameters", None)
        if not isinstance(rope, Mapping):
            rope = {}
        for name in ("original_max_position_embeddings", "llama_4_scaling_beta"):
            value = rope.get(name)
            if not Setting(float, 0.0, FLOAT32_MAX).allows(value):
                raise ValueError(
                    f"rope_parameters.{name}={value!r} in config.json of the checkpoint must be a number, "
                    "by which queries are scaled; correct it, or copy the checkpoint again."
                )

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        model_config = vllm_config.model_config
        settings = model_config.diffusion.settings
        if settings.rule is None and cls.default_rule(model_config) == AUTOREGRESSIVE:
            logger.info(
                "dlm_paradigm=%r in config.json: tokens are written one after another unless a request or %s chooses "
                'a rule; "reveal" denoises blocks.',
                AUTOREGRESSIVE,
                OPTION.replace("...", '"rule": ...'),
            )
        super().verify_and_update_config(vllm_config)
        # The workers find it again, and put it on the layers.
        if verifies_drafts(model_config):
            log_drafts(model_config, find_draft_lora(model_config), FOLDER)
