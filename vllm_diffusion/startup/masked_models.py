"""Start-up of families whose undecided positions hold a mask token: the length of their blocks,
their mask, and no sliding window that no layer has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import AlignedBlock, CanvasLayout
from vllm_diffusion.startup.denoising_settings import (
    canvas_length,
    checkpoint_settings,
    denoising_settings,
)
from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig
from vllm_diffusion.startup.plugin_settings import PluginSettings
from vllm_diffusion.startup.published_runs import log_differences, warn_of_one_a_pass

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import DiffusionConfig, ModelConfig, VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")


class MaskedEngineConfig(BlockDiffusionEngineConfig):
    """Base for a family whose undecided positions hold a mask token.

    Attributes:
        mask_token_id: Mask token if ``config.json`` has none.
        block_length: Positions of a block if ``config.json`` has no length.
        block_length_key: Key of the block length in ``config.json``.
        generation_keys: Names in ``generation_config.json`` of settings that the publisher calls
            otherwise than this package, by the name here; ``None`` for a setting that the
            publisher's loop does not read there, although the file has its name.
        layout: Layout of its canvases in a sequence.
        end_texts: Tokens at which the published loop ends an answer by itself, whatever the
            checkpoint's files name.
    """

    mask_token_id: ClassVar[int]
    block_length: ClassVar[int]
    block_length_key: ClassVar[str] = "block_size"
    generation_keys: ClassVar[Mapping[str, str | None]] = {}
    layout: ClassVar[type[CanvasLayout]] = AlignedBlock
    end_texts: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def verify_and_update_model_config(cls, model_config: ModelConfig) -> None:
        """Set ``canvas_length``, the field by which vLLM recognises a diffusion model, and take out
        a sliding window that no layer has: vLLM gives every layer the number in ``config.json``,
        whatever the flag beside it is.
        """
        config, text_config = model_config.hf_config, model_config.hf_text_config
        if getattr(config, "canvas_length", None) is None:
            config.canvas_length = cls.named_length(model_config)[0]
        if not cls.has_window(text_config):
            text_config.sliding_window = None

    @classmethod
    def named_length(cls, model_config: ModelConfig) -> tuple[int, str | None]:
        """Return the positions of the checkpoint's blocks, and what names them; ``None`` for a
        guess.
        """
        length = getattr(model_config.hf_config, cls.block_length_key, None)
        if length is not None:
            return length, f"{cls.block_length_key} in config.json"
        return cls.unwritten_length(str(model_config.model))

    @classmethod
    def unwritten_length(cls, name: str) -> tuple[int, str | None]:
        """Return what :meth:`named_length` does if ``config.json`` has no length.

        Args:
            name: Folder or id of the checkpoint.
        """
        return cls.block_length, "the length in the published loop, since config.json names none"

    @classmethod
    def has_window(cls, config: PretrainedConfig) -> bool:
        """Tell whether some layer of a model has a sliding window by its ``config.json``.

        Args:
            config: Configuration of the model's text layers. As in the publishers' classes, those
                from ``max_window_layers`` on have the window where ``use_sliding_window`` is true.
        """
        first = getattr(config, "max_window_layers", 0) or 0
        return (
            bool(getattr(config, "use_sliding_window", False))
            and getattr(config, "sliding_window", None) is not None
            and first < config.num_hidden_layers
        )

    @classmethod
    def apply_stock_defaults(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.diffusion_config is None:
            length, source = cls.named_length(vllm_config.model_config)
            if source is not None:
                logger.info("blocks of %d positions: %s.", length, source)
            else:
                logger.warning(
                    "assuming blocks of %d positions: neither config.json (%s) nor the checkpoint's name "
                    "states their length. If it was trained with another, set --diffusion-config "
                    "'{\"canvas_length\": N}'.",
                    length,
                    cls.block_length_key,
                )
        super().apply_stock_defaults(vllm_config)

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        text_config = model_config.hf_text_config
        if cls.has_window(text_config):
            raise ValueError(
                f"sliding_window={text_config.sliding_window!r} in config.json of the checkpoint is not "
                "supported for this family, and no published checkpoint has one; if the "
                "checkpoint was trained without it, set sliding_window to null there."
            )
        length = getattr(model_config.hf_config, "canvas_length", None)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(
                f"{cls.block_length_key}={length!r} in config.json of the checkpoint must be an "
                f"integer of at least 1, the length of its blocks ({cls.block_length} as published)."
            )

    @classmethod
    def canvas_spec(
        cls, model_config: ModelConfig, settings: PluginSettings, canvases: DiffusionConfig
    ) -> CanvasSpec:
        mask = getattr(model_config.hf_config, "mask_token_id", None)
        if mask is None:
            mask = cls.mask_token_id
        published = cls.published_rule(model_config, settings)
        rule = published.rule(mask)
        length = canvas_length(settings, canvases.canvas_length, published.draft_length)
        values = {"max_denoising_steps": length, **rule.defaults, **published.settings}
        max_steps, of_rule = denoising_settings(
            settings,
            canvases.max_denoising_steps,
            rule,
            checkpoint_settings(model_config, values, cls.generation_keys),
        )
        layout = (published.layout or cls.layout)(length)
        spec = CanvasSpec.of(
            layout, rule, max_steps, of_rule, mask_token_id=mask, end_texts=cls.end_texts
        )
        log_differences(model_config, settings, spec, cls.chosen_rule(model_config, settings))
        warn_of_one_a_pass(settings, spec)
        return spec
