"""A2D: autoregressive models trained further to diffuse; blocks of 32 masks (BD3LM), revealed by probability.

Blocks are counted from the end of the prompt and attend in both directions, the prompt's too, whose first block
is the short one.

Source: ZHZisZZ/dllm at ca17675, ``dllm/core/samplers/bd3lm.py`` and ``utils.py``, with its defaults: 128 steps for 128
tokens, which are 32 for each block. It differs:

- Steps are those of a block; there they are those of the answer, divided by its blocks and rounded up.
- An answer ends with its first end token; there after the block that has one.
- The padding token is a token like others; there one that is generated vanishes from later blocks.
- Batches have no padding: a request gets what it gets alone.
- The mask token is never drawn, and among equally confident positions the leftmost comes first.
- ``right_shift_logits``, ``cfg_scale``, ``stochastic_transfer`` and ``remasking="random"`` are left out.

``Qwen3-0.6B-diffusion-mdlm`` has the same fields and attends over the whole sequence: it is known by its name.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import Qwen3Config

from vllm_diffusion.decoding.layouts import BlockAfterPrompt
from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.startup.engine_config import MaskedEngineConfig, PublishedRule
from vllm_diffusion.weights.tensor_rules import BodyTensors, TensorRules

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class A2DQwen3Config(Qwen3Config):
    """Qwen3's, by another name."""

    model_type = "a2d-qwen3"


class A2DEngineConfig(MaskedEngineConfig):
    """The entry of ``A2DQwen3LMHeadModel``."""

    rules = {
        "reveal": PublishedRule(
            partial(
                Reveal,
                includes_threshold=True,
                at_request_temperature=False,
                spreads_masks=True,
                rounds_to_even=True,
            ),
            {"reveal_threshold": 0.9, "strategy": "static"},
        )
    }
    mask_token_id = 151669
    block_length = 32
    layout = BlockAfterPrompt

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        super().check_model(model_config)
        if "mdlm" in Path(model_config.model).name.lower():
            raise ValueError(
                f"{model_config.model} is by its name trained as MDLM, which attends over the whole sequence "
                "and is not served; serve the BD3LM of the same publisher, or rename the folder if it is one."
            )

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        return BodyTensors("Qwen3ForCausalLM")
