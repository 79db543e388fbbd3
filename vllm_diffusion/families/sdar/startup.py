"""SDAR, SDAR-MoE and TraDo: blocks of 4 masks, revealed by confidence.

Blocks are counted from the start of the prompt and attend in both directions, the prompt's too. A
block's KV is that of its decided tokens, written together with the next block's first step.

Source: JetAstra/SDAR at c2041a8, ``generate.py``, whose ``low_confidence_dynamic``,
``low_confidence_static`` and ``sequential`` are ``dynamic``, ``static`` and ``sequential`` here. It
differs:

- Temperature 0 takes the likeliest token at its plain probability; there it divides by zero.
- A step reveals masks only; there, where it is to reveal more than are left, it overwrites decided
  tokens, of the prompt too.
- The mask token is never drawn, an answer ends with its first end token, and among equally
  confident positions the leftmost comes first.
- ``entropy_bounded`` is left out: it uses a name that was never assigned.
"""

from __future__ import annotations

from transformers import Qwen3Config, Qwen3MoeConfig

from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.quantization.body_tensors import BodyTensors
from vllm_diffusion.quantization.tensor_rules import TensorRules
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_engine_config import MaskedEngineConfig


class SDARConfig(Qwen3Config):
    """Qwen3's, by another name."""

    model_type = "sdar"


class SDARMoeConfig(Qwen3MoeConfig):
    """Qwen3-MoE's, by another name."""

    model_type = "sdar_moe"


class SDAREngineConfig(MaskedEngineConfig):
    """The entry of ``SDARForCausalLM``."""

    # The script's default; its evaluations and engines that serve it take 0.85 to 0.95.
    rules = {"reveal": PublishedRule(Reveal, {"reveal_threshold": 0.85, "strategy": "dynamic"})}
    mask_token_id = 151669
    block_length = 4

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        return BodyTensors("Qwen3ForCausalLM")


class SDARMoeEngineConfig(SDAREngineConfig):
    """The entry of ``SDARMoeForCausalLM``."""

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        return BodyTensors("Qwen3MoeForCausalLM")
