"""Start-up of a family of masked block-diffusion models."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.layouts import AlignedBlock, CanvasLayout
from vllm_diffusion.startup.denoising_settings import Published, denoising_settings
from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig
from vllm_diffusion.startup.generation_config import generation_config
from vllm_diffusion.startup.published_runs import log_differences

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class MaskedEngineConfig(BlockDiffusionEngineConfig):
    """Base for a family whose undecided positions hold a mask token.

    Attributes:
        mask_token_id: Mask token if ``config.json`` has none.
        block_length: Positions of a block if ``config.json`` has no length.
        block_length_key: Key of the block length in ``config.json``.
        layout: Layout of its canvases in a sequence.
    """

    mask_token_id: ClassVar[int]
    block_length: ClassVar[int]
    block_length_key: ClassVar[str] = "block_size"
    layout: ClassVar[type[CanvasLayout]] = AlignedBlock

    @classmethod
    def verify_and_update_model_config(cls, model_config: ModelConfig) -> None:
        """Set ``canvas_length``, the field by which vLLM recognises a diffusion model."""
        config = model_config.hf_config
        if getattr(config, "canvas_length", None) is None:
            config.canvas_length = getattr(config, cls.block_length_key, cls.block_length)

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        length = getattr(model_config.hf_config, "canvas_length", None)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(
                f"{cls.block_length_key}={length!r} in config.json of the checkpoint must be an "
                f"integer of at least 1, the length of its blocks ({cls.block_length} as published)."
            )

    @classmethod
    def canvas_spec(cls, vllm_config: VllmConfig) -> CanvasSpec:
        model_config = vllm_config.model_config
        mask = getattr(model_config.hf_config, "mask_token_id", None)
        if mask is None:
            mask = cls.mask_token_id
        published = cls.published_rule(vllm_config)
        rule = published.rule(mask)
        length = vllm_config.diffusion_config.canvas_length
        # A checkpoint's own file may have other values, under the same names.
        generation, source = generation_config(model_config)
        values = {"max_denoising_steps": length, **published.settings}
        values |= {name: value for name, value in generation.items() if name in values}
        max_steps, settings = denoising_settings(vllm_config, rule, Published(values, source))
        layout = (published.layout or cls.layout)(length)
        spec = CanvasSpec(layout, rule, max_steps, settings, mask_token_id=mask)
        log_differences(vllm_config, spec, cls.chosen_rule(vllm_config))
        return spec
