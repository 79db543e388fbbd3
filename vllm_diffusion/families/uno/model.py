"""Uno on vLLM's Qwen3, with the LoRA of its drafts."""

from __future__ import annotations

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from vllm_diffusion.families.uno.startup import find_draft_lora
from vllm_diffusion.runner.adapted_drafts import AdaptedDraftModel


class UnoQwen3ForCausalLM(AdaptedDraftModel, Qwen3ForCausalLM):
    """Qwen3-8B."""

    find_draft_lora = staticmethod(find_draft_lora)
