"""Start-up of DiffusionGemma."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.families.diffusion_gemma.config_numbers import check_config_numbers
from vllm_diffusion.families.diffusion_gemma.defaults import published_settings
from vllm_diffusion.families.diffusion_gemma.tensors import DiffusionGemmaTensors
from vllm_diffusion.layouts import FreeCanvas
from vllm_diffusion.startup.denoising_settings import denoising_settings
from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig, PublishedRule
from vllm_diffusion.weights.tensor_rules import TensorRules

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class DiffusionGemmaEngineConfig(BlockDiffusionEngineConfig):
    """The entry of ``DiffusionGemmaForBlockDiffusion``."""

    rules = {"entropy_bound": PublishedRule(EntropyBound)}
    is_self_conditioned = True

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        _check_canvas_length(model_config)
        check_config_numbers(model_config.hf_config)

    @classmethod
    def apply_stock_defaults(cls, vllm_config: VllmConfig) -> None:
        from vllm.model_executor.models.config import DiffusionGemmaModelForBlockDiffusionConfig

        DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)

    @classmethod
    def canvas_spec(cls, vllm_config: VllmConfig) -> CanvasSpec:
        rule = cls.published_rule(vllm_config).rule()
        max_steps, settings = denoising_settings(
            vllm_config, rule, published_settings(vllm_config.model_config)
        )
        layout = FreeCanvas(vllm_config.diffusion_config.canvas_length)
        return CanvasSpec(layout, rule, max_steps, settings)

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        return DiffusionGemmaTensors()


def _check_canvas_length(model_config: ModelConfig) -> None:
    canvas_length = getattr(model_config.hf_config, "canvas_length", None)
    overrides = model_config.hf_overrides
    path = Path(model_config.hf_config_path or model_config.model) / "config.json"
    if path.is_file() and not (isinstance(overrides, dict) and "canvas_length" in overrides):
        # Where the file is silent, its class has a default that need not be the model's.
        canvas_length = json.loads(path.read_text(encoding="utf-8")).get("canvas_length")
    if canvas_length is None:
        raise ValueError(
            "config.json of the checkpoint has no canvas_length; add the number of positions that "
            "it denoises together (256 for DiffusionGemma-26B)."
        )
    if not isinstance(canvas_length, int) or isinstance(canvas_length, bool) or canvas_length < 1:
        raise ValueError(
            f"canvas_length={canvas_length!r} in config.json of the checkpoint must be an integer "
            "of at least 1 (256 for DiffusionGemma-26B)."
        )
