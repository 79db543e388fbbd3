"""LLaDA2: blocks of 32, revealed by confidence; 2.1 also edits what it has revealed, 2.2 moves it.

Blocks are counted from the start of the prompt and attend in both directions, the prompt's too. All
checkpoints have the same architecture and layout. Those with ``expert_capacity`` in ``config.json``
are 2.2's, which chooses experts by block and has a rule of its own. Of the others, 2.1's rule
serves those with "LLaDA2.1" in their name, and any with the setting ``rule``.

Source: ``modeling_llada2_moe.py`` of inclusionAI/LLaDA2.0-mini and LLaDA2.1-mini as found in public
copies. 2.2's file was not found: its loop and routing are those that FLX-OSS/FluxServe describes
and tests its own against, at 5dcf8a8. All of them differ:

- Temperature 0 takes the likeliest token at its plain probability; in 2.0's file it draws from the
  unscaled distribution.
- A finished block that has an end token ends the answer, which is cut there (``eos_early_stop`` of
  2.1; in 2.0 the default); 2.0's ``eos_early_stop`` is the setting ``converge_at_end``.
- The mask token is never drawn, and among equally confident positions the leftmost comes first.

2.2 differs in this too:

- A step that repeats an earlier one draws the least confident of the positions that it changes
  again; there it is a random one. What it draws, and what the final step puts in the place of
  DELETE and SPLIT, is the likeliest token at temperatures above 0 too. Earlier steps are remembered
  by 64 bits of each, there as they are.
- The last step that the step cap allows (``max_steps_per_block``; here ``max_denoising_steps``) is
  a final one; there it leaves masks.
- DELETE and SPLIT in a prompt are left alone; there they are applied.
- A finished block that has an end token ends the answer, as in 2.1; what 2.2 does was not seen.
- With ``top_k`` or ``top_p`` a mask's probability is that among what they keep; there it is the
  model's own, as it is here without them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from vllm_diffusion.decoding.levenshtein import Levenshtein
from vllm_diffusion.decoding.reveal import Reveal, RevealAndEdit
from vllm_diffusion.decoding.rule import INT32_MAX, Setting
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_models import MaskedEngineConfig
from vllm_diffusion.startup.plugin_settings import OPTION, PluginSettings
from vllm_diffusion.weights.checkpoint_tensors import CheckpointTensors, Shape

if TYPE_CHECKING:
    from vllm.config import DiffusionConfig, ModelConfig

    from vllm_diffusion.decoding.canvas_spec import CanvasSpec

logger = logging.getLogger("vllm.vllm_diffusion")


class LLaDA2MoeConfig(PretrainedConfig):
    """Configuration from ``config.json``, with the values that the published code assumes.

    Attributes:
        other_model_types: What its publisher's trainer writes (inclusionAI/dFactory at 92b6890).
    """

    model_type = "llada2_moe"
    other_model_types = ("llada2_moe_veomni",)

    def __init__(self, rope_theta: float = 600000.0, **fields: Any) -> None:
        """Take the fields of ``config.json``."""
        super().__init__(**({"use_qk_norm": True, "partial_rotary_factor": 0.5} | fields))
        if getattr(self, "rope_parameters", None) is None:
            self.rope_parameters: dict[str, Any] = {
                "rope_type": "default",
                "rope_theta": rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            }


class LLaDA2Tensors(CheckpointTensors):
    """Names and shapes as published; experts fused here, and one by one in the files."""

    unquantised = ("word_embeddings.weight", "mlp.gate.weight")

    def shapes(self, config: Any) -> dict[str, Shape]:
        hidden, head_dim = config.hidden_size, config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        shapes: dict[str, Shape] = {
            "model.word_embeddings.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            qkv = (num_heads + 2 * num_kv_heads) * head_dim
            shapes |= {
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "post_attention_layernorm.weight": (hidden,),
                prefix + "attention.query_key_value.weight": (qkv, hidden),
                prefix + "attention.query_layernorm.weight": (head_dim,),
                prefix + "attention.key_layernorm.weight": (head_dim,),
                prefix + "attention.dense.weight": (hidden, num_heads * head_dim),
            }
            shapes |= self._mlp(config, prefix + "mlp.", layer < config.first_k_dense_replace)
        return shapes

    def _mlp(self, config: Any, prefix: str, is_dense: bool) -> dict[str, Shape]:
        hidden, num_experts = config.hidden_size, config.num_experts

        def gated(stem: str, size: int) -> dict[str, Shape]:
            return {
                stem + "gate_proj.weight": (size, hidden),
                stem + "up_proj.weight": (size, hidden),
                stem + "down_proj.weight": (hidden, size),
            }

        if is_dense:
            return gated(prefix, config.intermediate_size)
        size = config.moe_intermediate_size
        return {
            prefix + "gate.weight": (num_experts, hidden),
            prefix + "gate.expert_bias": (num_experts,),
            prefix + "experts.gate_up_proj": (num_experts, 2 * size, hidden),
            prefix + "experts.down_proj": (num_experts, hidden, size),
            **gated(prefix + "shared_experts.", size * config.num_shared_experts),
        }


class LLaDA2EngineConfig(MaskedEngineConfig):
    """The entry of ``LLaDA2MoeModelLM``."""

    rules = {
        "reveal": PublishedRule(Reveal, {"reveal_threshold": 0.95, "strategy": "dynamic"}),
        "reveal_and_edit": PublishedRule(
            RevealAndEdit,
            {
                "reveal_threshold": 0.95,
                "strategy": "dynamic",
                "editing_threshold": 0.9,
                "max_post_steps": 16,
                # A mask a step, and the steps after them.
                "max_denoising_steps": 48,
            },
        ),
        "levenshtein": PublishedRule(
            partial(Levenshtein, delete_token_id=156930, split_token_id=156931),
            {
                "reveal_threshold": 0.5,
                "strategy": "dynamic",
                "editing_threshold": 0.0,
                "max_post_steps": 16,
                "reveal_steps": 32,
                "max_denoising_steps": 1000,
            },
        ),
    }
    mask_token_id = 156895
    tensors = LLaDA2Tensors()
    block_length = 32

    @classmethod
    def default_rule(cls, model_config: ModelConfig) -> str:
        if _expert_capacity(model_config) is not None:
            return "levenshtein"
        return "reveal_and_edit" if "llada2.1" in str(model_config.model).lower() else "reveal"

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        super().check_model(model_config)
        config, capacity = model_config.hf_config, _expert_capacity(model_config)
        if capacity is None:
            return
        for name in ("num_experts_per_tok", "num_experts"):
            number = getattr(config, name, None)
            if not Setting(int, 1, INT32_MAX).allows(number):
                raise ValueError(
                    f"{name}={number!r} in config.json of the checkpoint must be an integer of at least 1; "
                    "correct it, or copy the checkpoint again."
                )
        least, most = config.num_experts_per_tok, config.num_experts
        if not Setting(int, least, most).allows(capacity):
            raise ValueError(
                f"expert_capacity={capacity!r} in config.json of the checkpoint must be an integer of "
                f"at least num_experts_per_tok={least} and at most num_experts={most}, the experts "
                "that the tokens of a block share."
            )
        vocab_size = model_config.get_vocab_size()
        for name in ("delete_token_id", "split_token_id"):
            token = getattr(config, name, None)
            if not Setting(int, 0, vocab_size - 1).allows(token):
                raise ValueError(
                    f"{name}={token!r} in config.json of the checkpoint must be an integer of at least "
                    f"0 and below vocab_size={vocab_size}, the token by which LLaDA2.2 edits."
                )

    @classmethod
    def published_rule(cls, model_config: ModelConfig, settings: PluginSettings) -> PublishedRule:
        published = super().published_rule(model_config, settings)
        config = model_config.hf_config
        moves = published is cls.rules["levenshtein"]
        if moves and _expert_capacity(model_config) is None:
            raise ValueError(
                f'{OPTION}: rule="levenshtein" is LLaDA2.2\'s, and config.json of the checkpoint has no '
                "expert_capacity; leave rule out."
            )
        if not moves and _expert_capacity(model_config) is not None:
            # It writes DELETE and SPLIT, which no other rule takes for what they are.
            raise ValueError(
                f"{OPTION}: rule={settings.rule!r} cannot serve a checkpoint with "
                "expert_capacity in config.json (LLaDA2.2), which deletes and splits; leave rule out."
            )
        if not moves:
            return published
        ids = {name: getattr(config, name) for name in ("delete_token_id", "split_token_id")}
        return replace(published, rule=partial(Levenshtein, **ids))

    @classmethod
    def canvas_spec(
        cls, model_config: ModelConfig, settings: PluginSettings, canvases: DiffusionConfig
    ) -> CanvasSpec:
        spec = super().canvas_spec(model_config, settings, canvases)
        routed = model_config.hf_config.canvas_length
        if _expert_capacity(model_config) is not None and spec.length != routed:
            raise ValueError(
                f"--diffusion-config: canvas_length={spec.length} must be {routed}, the block_size by "
                "which the checkpoint's experts are chosen; leave it out."
            )
        _log_rule(cls.chosen_rule(model_config, settings))
        return spec


def _log_rule(rule: str) -> None:
    """Say which version's loop runs, since ``config.json`` does not tell 2.0 from 2.1."""
    if rule == "levenshtein":
        logger.warning(
            "rule='levenshtein' (LLaDA2.2): the publisher's code is not public, and the loop differs "
            "from SGLang's where a block repeats an earlier state; see docs/use/families.md."
        )
        return
    other = "reveal" if rule == "reveal_and_edit" else "reveal_and_edit"
    versions = {"reveal": "LLaDA2.0", "reveal_and_edit": "LLaDA2.1"}
    logger.info(
        'using rule=%r (%s\'s loop): both versions have one architecture, and only "LLaDA2.1" in the '
        'checkpoint\'s name tells them apart; --additional-config \'{"diffusion": {"rule": "%s"}}\' selects '
        "%s's.",
        rule,
        versions[rule],
        other,
        versions[other],
    )


def _expert_capacity(model_config: ModelConfig) -> Any:
    """Experts that the tokens of a block share, in LLaDA2.2; ``None`` in the others."""
    return getattr(model_config.hf_config, "expert_capacity", None)
