"""DreamReasoner: blocks of 32 masks, revealed by confidence.

Blocks are counted from the start of the prompt and attend in both directions, the prompt's too.
Dream-7B has the same ``model_type``, another architecture and other layers; its ``config.json`` has
no ``block_size``.

Source: a third party's port of the checkpoint's own ``generation_utils.py``, which claims to be
exact: Yanzhen-CN/Benchmark-dllm at b8e8cfb, ``src/dllm_bench/models/dreamreasoner.py``. Layers and
configuration: SJTU-DENG-Lab/Diffulex at 184ba97, ``diffulex/model/dream_reasoner.py`` and its test.
The publisher's own files were not found, and no published weights were run.

The loop is SDAR's. That its last step takes every mask changes nothing: the even schedule reveals
the whole block by then. ``low_confidence_dynamic``, ``low_confidence_static`` and ``sequential``
are ``dynamic``, ``static`` and ``sequential`` here. It differs:

- ``static`` takes as many steps as the block is long, like the others; there it takes one unless
  the call says otherwise (``"diffusion_max_steps": 1``).
- ``sequential`` reveals the leftmost masks; there a run of positions from the first mask on, which
  counts decided positions too. They are the same unless a request pins tokens.
- At temperature 0 a probability is the plain one; there ``top_k`` and ``top_p`` act on it.
- The mask token is never drawn, an answer ends with its first end token, and among equally
  confident positions the leftmost comes first.
- ``entropy_bounded`` is left out: its bound is of ``p log p`` of the drawn token alone, which is
  not an entropy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_models import MaskedEngineConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig


@strict
class DreamConfig(Qwen3Config):
    """Qwen3's, by the name of all Dream models, with a ``head_dim`` that may be null or missing."""

    model_type = "Dream"
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class DreamReasonerEngineConfig(MaskedEngineConfig):
    """The entry of ``DreamForCausalLM``."""

    rules = {"reveal": PublishedRule(Reveal, {"reveal_threshold": 0.9, "strategy": "dynamic"})}
    body = "Qwen3ForCausalLM"
    mask_token_id = 151669
    block_length = 32

    @classmethod
    def verify_and_update_model_config(cls, model_config: ModelConfig) -> None:
        """Refuse a Dream without blocks."""
        if getattr(model_config.hf_config, cls.block_length_key, None) is None:
            raise ValueError(
                f"DreamForCausalLM without {cls.block_length_key} in config.json is not a DreamReasoner, which "
                f"has blocks of {cls.block_length}. If it is a Dream-7B, --hf-overrides "
                """'{"architectures": ["DreamModel"]}' serves it."""
            )
        super().verify_and_update_model_config(model_config)
