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

Checkpoints of strictly causal weights carry the same architecture and ``model_type``, and would be
answered wrongly by this loop. They are distinguished by fields and files of their own:
``use_regular_causal`` (I-DLM: thuEcstasy/I-DLM at 3342a17, ``configuration_sdar.py``;
rjagalamari/I-DLM at 0ee56b6, ``relay_model/config.json``), and block lengths that no SDAR is
published with. An adapter for drafts in ``adapter/`` makes it Uno (``families/uno``).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from transformers import Qwen3Config, Qwen3MoeConfig

from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_models import MaskedEngineConfig
from vllm_diffusion.startup.plugin_settings import OPTION, PluginSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# README of JetAstra/SDAR at c2041a8; I-DLM is trained with 1, 2, 3 and 7.
_PUBLISHED_BLOCK_LENGTHS = (4, 8, 16, 32, 64)
# Names that tell a length, wherever they stand in a path: by a suffix; a published name without one
# has blocks of 4.
_NAME = re.compile(
    r"((?:SDAR|TraDo)(?:[^/]*-b(8|16|32|64)(?![\w.])"
    r"|-[\d.]+B(?:-A3B)?-(?:Chat|Sci|Sci-Base|Instruct|Thinking)(?=/|$)))",
    re.IGNORECASE,
)


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
    body = "Qwen3ForCausalLM"

    @classmethod
    def unwritten_length(cls, name: str) -> tuple[int, str | None]:
        """Return the length by the checkpoint's name, since published files leave it out."""
        if not (names := _NAME.findall(name)):
            return cls.block_length, None
        last, length = names[-1]
        return int(length or cls.block_length), f"as {last} is published"

    @classmethod
    def published_rule(cls, model_config: ModelConfig, settings: PluginSettings) -> PublishedRule:
        """Refuse weights that were trained with strictly causal attention, which SDAR's were
        not.
        """
        published = super().published_rule(model_config, settings)
        overrides = json.dumps({"architectures": [cls.body]})
        remedy = (
            f"--hf-overrides '{overrides}' has vLLM serve its weights as an ordinary causal model"
        )
        if getattr(model_config.hf_config, "use_regular_causal", None):
            raise ValueError(
                "config.json of the checkpoint has use_regular_causal=true: its weights attend causally (I-DLM), and "
                f"SDAR's loop would answer wrongly with them; {remedy}."
            )
        length = model_config.hf_config.canvas_length
        if length not in _PUBLISHED_BLOCK_LENGTHS and settings.rule is None:
            raise ValueError(
                f"block_size={length} in config.json of the checkpoint is not a length that SDAR is published "
                f"with ({', '.join(map(str, _PUBLISHED_BLOCK_LENGTHS))}). If it is I-DLM, whose weights attend "
                f"causally, {remedy}; if it is an SDAR, set {OPTION} with "
                '"rule": "reveal".'
            )
        return published


class SDARMoeEngineConfig(SDAREngineConfig):
    """The entry of ``SDARMoeForCausalLM``."""

    body = "Qwen3MoeForCausalLM"
