"""iLLaDA: the whole sequence in both directions, a block of it at a time and none after that.

Source: ``var_generate``, the publisher's loop with LLaDA's ``generate`` for each block, and the
modelling file, both as found in public copies; blocks of 32 in 32 steps, as its published settings.
The file with the ``model_type`` was not found; ``illada`` is what others' tests give it. It differs
as LLaDA does (``llada/startup.py``), and in this:

- An answer ends with the first end token of a finished block; there stop strings are looked for in
  its text.
- ``logits_eos_inf`` and ``confidence_eos_eot_inf`` are left out: they name tokens of LLaDA's
  vocabulary there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import LlamaConfig

from vllm_diffusion.decoding.layouts import GrowingSequence
from vllm_diffusion.decoding.reveal_in_blocks import RevealWithThoughts
from vllm_diffusion.families.llada.startup import even_blocks
from vllm_diffusion.startup.whole_sequences import WholeSequenceEngineConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class ILLaDAConfig(LlamaConfig):
    """Llama's, by another name."""

    model_type = "illada"


class ILLaDAEngineConfig(WholeSequenceEngineConfig):
    """The entry of ``ILLaDAForCausalLM``."""

    rules = {"reveal_in_blocks": even_blocks(RevealWithThoughts, 32)}
    body = "LlamaForCausalLM"
    mask_token_id = 5
    block_length = 32
    layout = GrowingSequence

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        super().check_model(model_config)
        if (eps := getattr(model_config.hf_config, "layer_norm_eps", None)) is not None:
            raise ValueError(
                f"layer_norm_eps={eps!r} in config.json asks for layer norms, which are not supported; "
                "published iLLaDAs have RMS norms."
            )
