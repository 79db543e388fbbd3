"""Fast-dLLM v2: blocks of 32, filled by sub-blocks of 8, over logits shifted by one.

The row of a position predicts the token after it. A block's first token comes from the pass that
writes the known tokens' keys and values, and is the likeliest at any temperature; a block that
begins within the prompt has it already. Blocks are counted from the start of the prompt and attend
in both directions, the prompt's too.

Source: ``generate`` of ``modeling.py`` of Efficient-Large-Model/Fast_dLLM_v2, as found in public
copies; NVlabs/Fast-dLLM at b9cf368, ``v2/run_chatbot.py`` (threshold 0.9). It differs:

- A prompt of exactly one block is prefilled; there it is not, and the blocks after it are written
  as if nothing were before them.
- ``use_block_cache`` is left out: with it keys and values of other sub-blocks are an earlier
  step's.
- ``top_p`` is 1 unless the request sets it; there it is 0.95, which matters above
  temperature 0.
- The mask token is never drawn, and among equally confident positions the leftmost comes first.

Trainers run its objective on other bodies, and leave their ``config.json`` as it was: an operator
names the architecture, the length of a block (``bd_size``) and the mask token that a model was
trained with.
"""

from functools import partial

from transformers import Qwen2Config

from vllm_diffusion.decoding.layouts import ShiftedBlock
from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_models import MaskedEngineConfig


class FastDLLMConfig(Qwen2Config):
    """Qwen2's, by another name."""

    model_type = "Fast_dLLM_Qwen"


class FastDLLMEngineConfig(MaskedEngineConfig):
    """The entry of ``Fast_dLLM_QwenForCausalLM``."""

    body = "Qwen2ForCausalLM"
    rules = {
        "reveal": PublishedRule(
            partial(Reveal, judges_to_end=True, sub_block_length=8),
            {"reveal_threshold": 0.9, "strategy": "dynamic"},
        )
    }
    mask_token_id = 151665
    block_length = 32
    block_length_key = "bd_size"
    layout = ShiftedBlock


class FastDLLMQwen3EngineConfig(FastDLLMEngineConfig):
    """The entry of ``Fast_dLLM_Qwen3ForCausalLM``, a name that an operator gives."""

    body = "Qwen3ForCausalLM"
