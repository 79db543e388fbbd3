"""RND1: the whole sequence in both directions, the answer revealed by entropy in even steps.

A padding token stands after the masks of an answer, and is attended to: the published loop leaves
the last of ``max_new_tokens`` positions as it is, and generates the others. Here ``max_tokens`` are
generated, and the padding token follows them, so that 255 here is 256 there.

Source: RadicalNumerics/RND1 at 87d5f46, ``rnd``: ``sampling.py``, ``modeling_rnd.py`` and
``configuration_rnd.py``; 256 steps, as ``RND1GenerationConfig`` and the README. It differs:

- An answer ends with its first end token, when all of it is decided; there it goes on.
  ``ignore_eos`` gives all of it.
- Entropies are float32; there they have the model's dtype, in which many are 0 at the README's
  temperature of 0.01. Among equals the leftmost is revealed first; there ``torch.topk`` decides.
- Filters make each entropy NaN there, so that ``torch.topk`` alone decides which masks are
  revealed; here it is the entropy of what they keep. Its ``top_p`` always keeps two tokens.
- ``greedy=True`` beside a temperature above 0 is left out: greedy requests have temperature 0.
- Steps that reveal nothing are not passes, and draws are counted by the passes that are left.
- ``eb_gamma``, ``add_eos_at_end`` and an empty prompt are left out.
- The mask token is never drawn, and one in the prompt stays.

The layers are a Qwen3-MoE's, of experts alone, whose weights are normalised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import Qwen3MoeConfig

from vllm_diffusion.decoding.layouts import ShiftedSequence
from vllm_diffusion.decoding.timed_reveal import EntropySchedule
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.whole_sequences import WholeSequenceEngineConfig

if TYPE_CHECKING:
    from vllm.config import DiffusionConfig, ModelConfig

    from vllm_diffusion.decoding.canvas_spec import CanvasSpec
    from vllm_diffusion.startup.plugin_settings import PluginSettings

# Values that the publisher's class has and a Qwen3-MoE has not, where ``config.json`` names none.
_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 48,
    "head_dim": 128,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
}
# What its class has whatever ``config.json`` says; it writes false for null.
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


class RND1Config(Qwen3MoeConfig):
    """Qwen3-MoE's, by another name."""

    model_type = "rnd1"

    def __init__(self, **fields: Any) -> None:
        """Take the fields of ``config.json``."""
        super().__init__(**(_DEFAULTS | fields | _FIXED))


class RND1EngineConfig(WholeSequenceEngineConfig):
    """The entry of ``RND1LM``."""

    rules = {"entropy_schedule": PublishedRule(EntropySchedule, {"max_denoising_steps": 256})}
    body = "Qwen3MoeForCausalLM"
    mask_token_id = 151669
    block_length = 256
    layout = ShiftedSequence

    @classmethod
    def canvas_spec(
        cls, model_config: ModelConfig, settings: PluginSettings, canvases: DiffusionConfig
    ) -> CanvasSpec:
        spec = super().canvas_spec(model_config, settings, canvases)
        return replace(spec, closing=(model_config.hf_config.pad_token_id,))
