"""Dream, Dream-Coder and DiffuCoder: the whole sequence in both directions, revealed by a schedule
in time.

Source: ``diffusion_generate`` of Dream's ``generation_utils.py``, as ZHZisZZ/dllm has it at
ca17675, with the README's 512 steps and ``alg="entropy"`` (DreamLM/Dream at fac0a7f), where the
function's default is ``origin``. It differs:

- An answer ends with its first end token, when all of it is decided; there it goes on, and demos
  cut the text. ``ignore_eos`` gives all of it.
- Steps that reveal nothing are not passes: with as many steps as tokens the first one, with twice
  as many half of them. Draws are counted by the passes that are left. ``origin`` leaves out none.
- With both filters ``top_k`` is applied first, as in vLLM; there ``top_p`` is.
- An entropy is that of the probabilities; there 1e-10 is added to each within the logarithm.
- The number of masks of a step is computed in float32 as there; where it is within rounding of a
  whole number (7 of 524,288 pairs of step and masks with 512 steps) it may be one more or less.
- The mask token is never drawn, and one in the prompt stays; among equals the leftmost comes first.
- DreamOn's growing canvas is left out.
"""

from vllm_diffusion.decoding.layouts import ShiftedSequence
from vllm_diffusion.decoding.timed_reveal import TimedReveal
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.whole_sequences import WholeSequenceEngineConfig


class DreamEngineConfig(WholeSequenceEngineConfig):
    """The entry of ``DreamModel``."""

    rules = {
        "timed_reveal": PublishedRule(
            TimedReveal,
            {"algorithm": "entropy", "eps": 1e-3, "alg_temp": 0.0, "max_denoising_steps": 512},
        )
    }
    generation_keys = {"algorithm": "alg", "max_denoising_steps": "steps"}
    body = "Qwen2ForCausalLM"
    mask_token_id = 151666
    block_length = 512
    layout = ShiftedSequence
    # By the README; config.json names the positions of the model that it was trained from.
    context_length = 2048
