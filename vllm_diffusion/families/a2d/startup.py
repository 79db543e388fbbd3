"""A2D: autoregressive models trained further to diffuse, as BD3LM or as MDLM; masks revealed by
probability.

BD3LM's blocks of 32 are counted from the end of the prompt and attend in both directions; so do the
prompt's own blocks, of which the first is the short one. MDLM attends over the whole sequence, with
the blocks of 128 after the one that is denoised.

Source: ZHZisZZ/dllm at ca17675, ``bd3lm.py``, ``mdlm.py`` and ``utils.py`` of
``dllm/core/samplers``, with their defaults: 128 steps for 128 tokens, which are as many for each
block as it has positions. It differs:

- Steps are those of a block; there they are those of the answer, divided by its blocks and rounded
  up.
- An answer ends with its first end token; there after the block that has one, as MDLM not at all
  (``ignore_eos``).
- The padding token is a token like others; there one that is generated vanishes from later blocks.
- Batches have no padding: a request gets what it gets alone.
- The mask token is never drawn, and among equally confident positions the leftmost comes first.
- ``cfg_scale`` and ``stochastic_transfer`` are left out, of BD3LM ``right_shift_logits`` and
  ``remasking="random"`` too. MDLM has them as the rule ``shifted_reveal_in_blocks`` and the
  strategy ``random``.

A checkpoint does not say which of the two it is: both have the same ``config.json``. An operator
names MDLM's architecture.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from vllm_diffusion.decoding.layouts import BlockAfterPrompt, ShiftedSequence
from vllm_diffusion.decoding.reveal import AS_LLADA, Reveal
from vllm_diffusion.decoding.reveal_in_blocks import RevealInBlocks
from vllm_diffusion.families.llada.startup import even_blocks
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_models import MaskedEngineConfig
from vllm_diffusion.startup.whole_sequences import WholeSequenceEngineConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class A2DQwen3Config(Qwen3Config):
    """Qwen3's, by another name."""

    model_type = "a2d-qwen3"


class A2DQwen2Config(Qwen2Config):
    """Qwen2's, by another name."""

    model_type = "a2d-qwen2"


class A2DLlamaConfig(LlamaConfig):
    """Llama's, by another name."""

    model_type = "a2d-llama"


class _Qwen3Body:
    """What entries have of Qwen3, however it was trained; the mask is the first id that the
    tokenizer has free.
    """

    body = "Qwen3ForCausalLM"
    mask_token_id = 151669


class _Qwen2Body(_Qwen3Body):
    body = "Qwen2ForCausalLM"
    mask_token_id = 151665


class _LlamaBody(_Qwen3Body):
    body = "LlamaForCausalLM"
    mask_token_id = 128256


class A2DEngineConfig(_Qwen3Body, MaskedEngineConfig):
    """The entry of ``A2DQwen3LMHeadModel``, as BD3LM."""

    rules = {
        "reveal": PublishedRule(
            partial(Reveal, **AS_LLADA, rounds_to_even=True),
            {"reveal_threshold": 0.9, "strategy": "static"},
        )
    }
    block_length = 32
    layout = BlockAfterPrompt

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        super().check_model(model_config)
        # The trainer writes to .../mdlm/DATA/checkpoint-final.
        ends = Path(model_config.model).absolute().parts[-3:]
        if re.findall("mdlm|bd3lm", "/".join(ends).lower())[-1:] == ["mdlm"]:
            own = model_config.architecture.replace("LMHeadModel", "MDLM")
            raise ValueError(
                f"{model_config.model} is by its path trained as MDLM, which attends over the whole sequence: set "
                f"""--hf-overrides '{{"architectures": ["{own}"]}}'. Rename the folder if it is a BD3LM."""
            )


class A2DQwen2EngineConfig(_Qwen2Body, A2DEngineConfig):
    """The entry of ``A2DQwen2LMHeadModel``."""


class A2DLlamaEngineConfig(_LlamaBody, A2DEngineConfig):
    """The entry of ``A2DLlamaLMHeadModel``."""


_MDLM = even_blocks(RevealInBlocks, 128, rounds_to_even=True)


class MDLMEngineConfig(_Qwen3Body, WholeSequenceEngineConfig):
    """The entry of ``A2DQwen3MDLM``, a name that an operator gives."""

    rules = {
        "reveal_in_blocks": _MDLM,
        "shifted_reveal_in_blocks": replace(_MDLM, layout=ShiftedSequence),
    }
    block_length = 128


class MDLMQwen2EngineConfig(_Qwen2Body, MDLMEngineConfig):
    """The entry of ``A2DQwen2MDLM``."""


class MDLMLlamaEngineConfig(_LlamaBody, MDLMEngineConfig):
    """The entry of ``A2DLlamaMDLM``."""
