"""Stable-DiffCoder: blocks of 4 masks, revealed by the model's own probability.

Blocks are counted from the start of the prompt and attend in both directions, the prompt's too.

Source: ``generate_block`` of ``modeling_stable_diffcoder.py`` of
ByteDance-Seed/Stable-DiffCoder-8B, as found in public copies. It differs:

- The last block is a whole one, of which the request gets its ``max_tokens``; there the last block
  is as much shorter as the prompt's remainder is long.
- Steps are those of a block; there they are those of the answer, divided by its blocks.
- With fewer steps than masks ``dynamic`` reveals at least what ``static`` would; there at least one
  a step, and a block that has masks left after its steps stays as it is.
- An answer ends with its first end token; there the rest of the block is filled with end tokens.
- ``shift`` and ``remasking="random"`` are left out; the published configuration uses neither.
- The mask token is never drawn, and among equally confident positions the leftmost comes first.
"""

from functools import partial

from vllm_diffusion.decoding.reveal import AS_LLADA, Reveal
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_models import MaskedEngineConfig


class StableDiffcoderEngineConfig(MaskedEngineConfig):
    """The entry of ``StableDiffcoderForCausalLM``."""

    rules = {
        "reveal": PublishedRule(
            partial(Reveal, **AS_LLADA), {"reveal_threshold": 0.95, "strategy": "dynamic"}
        )
    }
    body = "LlamaForCausalLM"
    mask_token_id = 5
    block_length = 4
