"""Nemotron-Labs-Diffusion: blocks of 32 behind a causal context.

A block starts where the known tokens end. Its first token, the seed, comes from the causal pass that
writes their keys and values: over the prompt, then over each finished block. The others start as
masks, and are revealed by the model's own probability, whatever the temperature. A block ends early
at an end token with no mask before it.

Source: ``modeling_nemotron_labs_diffusion.py`` of nvidia/Nemotron-Labs-Diffusion, as found in public
copies; mlx-vlm's ``models/nemotron_labs_diffusion`` at 9b13f522 does the same. It differs:

- The schedule of steps is over a block's length, of which 31 are masks; it is the same unless a
  request asks for fewer steps than that.
- The mask token is never drawn, and among equally confident positions the leftmost comes first.
- ``linear_spec_generate`` with its LoRA, ``causal_context=False`` and the thinking budget are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from transformers import Ministral3Config

from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.quantization.body_tensors import BodyTensors
from vllm_diffusion.quantization.tensor_rules import TensorRules
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_engine_config import MaskedEngineConfig


class NemotronLabsDiffusionConfig(Ministral3Config):
    """Ministral 3's, by another name."""

    model_type = "nemotron_labs_diffusion"


class NemotronLabsDiffusionEngineConfig(MaskedEngineConfig):
    """The entry of ``NemotronLabsDiffusionModel``."""

    # As on the card; without a threshold one token a step is the strategy "static".
    rules = {
        "reveal": PublishedRule(
            partial(
                Reveal, includes_threshold=True, at_request_temperature=False, judges_to_end=True
            ),
            {"reveal_threshold": 0.9, "strategy": "dynamic"},
        )
    }
    has_autoregressive_mode = True
    mask_token_id = 100
    block_length = 32
    layout: ClassVar[Mapping[str, bool]] = {"is_seeded": True}

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        prefixes = {"model.": "encoder.", "lm_head.": "diffusion_head."}
        return BodyTensors("Ministral3ForCausalLM", prefixes)
