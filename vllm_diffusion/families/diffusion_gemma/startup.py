"""Start-up of DiffusionGemma: its settings, the numbers of its configuration and the names of its
tensors.

transformers refuses a number of another type, by its name. One of the right type that is none of a
size would otherwise be served (a negative sliding window), or end in the middle of an allocation.

Encoder and decoder share their text layers. A checkpoint stores what they share once, under either
one's name; the decoder's is canonical. Only ``layer_scalar`` is stored for both.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import DenoisedDraft, EntropyBound
from vllm_diffusion.decoding.layouts import FreeCanvas, VerifiedDraft
from vllm_diffusion.decoding.rule import INT32_MAX, Setting
from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.startup.denoising_settings import (
    Published,
    canvas_length,
    denoising_settings,
    generation_config,
)
from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig, PublishedRule
from vllm_diffusion.weights.checkpoint_tensors import CheckpointTensors, Shape

if TYPE_CHECKING:
    from vllm.config import DiffusionConfig, ModelConfig, VllmConfig

    from vllm_diffusion.startup.plugin_settings import PluginSettings

logger = logging.getLogger("vllm.vllm_diffusion")
_SAMPLER_CLASS = "EntropyBoundSamplerConfig"
# google/diffusiongemma-26B-A4B-it's values; transformers takes them where a file is silent.
_PUBLISHED = {
    "max_denoising_steps": 48,
    "entropy_bound": 0.1,
    "confidence_threshold": 0.005,
    "stability_threshold": 1,
    "t_min": 0.4,
    "t_max": 0.8,
}
_KEYS = {"entropy_bound": "sampler_config.entropy_bound"}


def published_settings(model_config: ModelConfig) -> Published:
    """Read the settings in the checkpoint's ``generation_config.json``; what it lacks is as
    published.

    Raises:
        ValueError: If it names another sampler, or its sampler is not an object.
    """
    generation, source = generation_config(model_config)
    sampler = generation.get("sampler_config")
    if sampler is None:
        sampler = {}
    if not isinstance(sampler, Mapping):
        raise ValueError(
            f"{source}: sampler_config={sampler!r} must be an object with entropy_bound; correct it, or "
            "leave it out."
        )
    name = sampler.get("_cls_name", _SAMPLER_CLASS)
    if name != _SAMPLER_CLASS:
        raise ValueError(
            f"{source}: sampler_config is a {name}; only {_SAMPLER_CLASS} is implemented."
        )
    values = {**generation, "entropy_bound": sampler.get("entropy_bound")}
    missing = {name: value for name, value in _PUBLISHED.items() if values.get(name) is None}
    if missing:
        listed = ", ".join(f"{_KEYS.get(name, name)} ({value})" for name, value in missing.items())
        logger.info("%s has no %s; the published values in brackets are used.", source, listed)
    return Published(values | missing, source, keys=_KEYS)


# Far beyond any model, and far below what overflows when a few of them are multiplied.
_LARGEST_SIZE = 2**20
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_TEXT_SIZES = (*_SIZES, "moe_intermediate_size", "num_experts", "top_k_experts")
_VISION_SIZES = (
    *_SIZES,
    "num_key_value_heads",
    "head_dim",
    "patch_size",
    "pooling_kernel_size",
    "position_embedding_size",
    "default_output_length",
)
_IMAGE_TOKENS = ("image_token_id", "boi_token_id", "eoi_token_id")
# Numbers of a layer, and what a full-attention layer's own is called in the file.
_GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def _check(name: str, value: Any, low: float = 1, high: float = _LARGEST_SIZE) -> None:
    """Refuse a number of ``config.json`` beyond its bounds; ``None`` is left out and optional."""
    kind = "an integer" if isinstance(low, int) else "a number"
    if value is not None and not Setting(type(low), low, high).allows(value):
        raise ValueError(
            f"{name}={value!r} in config.json of the checkpoint must be {kind} between "
            f"{low} and {high}; correct it, or copy the checkpoint again."
        )


def check_config_numbers(hf_config: Any, takes_images: bool = True) -> None:
    """Raise unless a model can be made by the numbers in a checkpoint's configuration.

    Args:
        hf_config: transformers' configuration of a DiffusionGemma checkpoint.
        takes_images: False of a server with ``--language-model-only``, which reads no number of
            images.

    Raises:
        ValueError: Naming the number, what it is and what it may be.
    """
    text = hf_config.text_config
    for name in _TEXT_SIZES:
        _check(f"text_config.{name}", getattr(text, name, None))
    # 64 times the largest in use; a table of a number for each id is still 64 MiB.
    _check("text_config.vocab_size", text.vocab_size, high=2**24)
    for name in ("sliding_window", "max_position_embeddings"):
        _check(f"text_config.{name}", getattr(text, name, None), high=INT32_MAX)
    for layer, kind in zip(text.per_layer_config, text.layer_types, strict=True):
        for name in _GLOBAL:
            _check(_layer_name(name, kind), getattr(layer, name))
    _check("text_config.rms_norm_eps", text.rms_norm_eps, low=0.0, high=1.0)
    # Logits are divided by it, and multiplied again: its sign means nothing.
    cap = getattr(text, "final_logit_softcapping", None)
    low, high = (-1e6, -1e-3) if isinstance(cap, int | float) and cap < 0 else (1e-3, 1e6)
    _check("text_config.final_logit_softcapping", cap, low=low, high=high)
    for kind, rope in (text.rope_parameters or {}).items():
        if isinstance(rope, dict):
            name = f"text_config.rope_parameters.{kind}."
            _check(f"{name}rope_theta", rope.get("rope_theta"), low=1.0, high=1e12)
            factor = rope.get("partial_rotary_factor")
            _check(f"{name}partial_rotary_factor", factor, low=0.0, high=1.0)
    _check_divisions(text)
    vision = getattr(hf_config, "vision_config", None)
    if vision is None or not takes_images:
        return
    for name in _VISION_SIZES:
        _check(f"vision_config.{name}", getattr(vision, name, None))
    for name in _IMAGE_TOKENS:
        _check(name, getattr(hf_config, name, None), low=0, high=text.vocab_size - 1)


def _layer_name(name: str, kind: str) -> str:
    """Return the file's name for a number of a layer of this kind."""
    own = f"{_GLOBAL[name]} (or {name})" if kind == "full_attention" else name
    return f"text_config.{own}"


def _check_divisions(text: Any) -> None:
    """Heads share key-value heads evenly, and a token has no more experts than there are."""
    for layer, kind in zip(text.per_layer_config, text.layer_types, strict=True):
        if text.num_attention_heads % layer.num_key_value_heads:
            name = _layer_name("num_key_value_heads", kind)
            raise ValueError(
                f"{name}={layer.num_key_value_heads} in config.json of the checkpoint must divide "
                f"num_attention_heads={text.num_attention_heads}; correct one of them."
            )
    if text.num_experts is not None and text.top_k_experts > text.num_experts:
        raise ValueError(
            f"text_config.top_k_experts={text.top_k_experts} in config.json of the checkpoint must "
            f"be at most num_experts={text.num_experts}; correct one of them."
        )


ENCODER = "model.encoder.language_model."
DECODER = "model.decoder."
# The layers of both, where a trainer has them once.
SHARED = "model."


class DiffusionGemmaTensors(CheckpointTensors):
    """Tensors of the model that ``transformers`` makes of a configuration."""

    has_fused_experts = True

    def shapes(self, config: Any) -> dict[str, Shape]:
        from transformers import DiffusionGemmaForBlockDiffusion, Gemma4VisionConfig

        if config.vision_config is None:
            # Its class makes a tower whatever the configuration has.
            config = copy.copy(config)
            config.vision_config = Gemma4VisionConfig()
        with torch.device("meta"):
            model = DiffusionGemmaForBlockDiffusion(config)
        tensors = model.state_dict()
        shapes = {self.canonical_name(name): tuple(t.shape) for name, t in tensors.items()}
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        size = getattr(config, "self_conditioning_size", None)
        if size is not None:
            hidden = config.text_config.hidden_size
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = (hidden, size) if name == "down_proj" else (size, hidden)
                shapes[f"{DECODER}self_conditioning.{name}.weight"] = shape
        return shapes

    def canonical_name(self, name: str) -> str:
        """Return the canonical name of a tensor or module."""
        if name.startswith(ENCODER) and not name.endswith(".layer_scalar"):
            return DECODER + name.removeprefix(ENCODER)
        return name

    def all_names(self, name: str) -> tuple[str, ...]:
        if name.startswith(DECODER) and "self_conditioning" not in name:
            return name, ENCODER + name.removeprefix(DECODER)
        return (name,)

    def shared_name(self, name: str) -> str | None:
        """Return a tensor's name in a model of one stack, as NeMo trains it; ``None`` if it has
        none there.

        Its adapter of such a module acts on both the encoder's rows and the decoder's.
        """
        if not name.startswith(DECODER):
            return None
        return SHARED + name.removeprefix(DECODER)


class DiffusionGemmaEngineConfig(BlockDiffusionEngineConfig):
    """The entry of ``DiffusionGemmaForBlockDiffusion``."""

    rules = {
        "entropy_bound": PublishedRule(EntropyBound),
        # As measured on the shipped checkpoint: most tokens a second at 8 and at 32 requests.
        "linear_spec": PublishedRule(DenoisedDraft, layout=VerifiedDraft, draft_length=16),
    }
    has_autoregressive_mode = True
    tensors = DiffusionGemmaTensors()

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        _check_canvas_length(model_config)
        multimodal = model_config.multimodal_config
        takes_images = multimodal is None or not multimodal.language_model_only
        check_config_numbers(model_config.hf_config, takes_images)

    @classmethod
    def apply_stock_defaults(cls, vllm_config: VllmConfig) -> None:
        from vllm.model_executor.models.config import DiffusionGemmaModelForBlockDiffusionConfig

        DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)

    @classmethod
    def apply_autoregressive_defaults(cls, vllm_config: VllmConfig) -> None:
        # The encoder is a Gemma 4, whose layers differ in the size of their heads.
        from vllm.model_executor.models.config import Gemma4Config

        Gemma4Config.verify_and_update_config(vllm_config)
        _decisions_of_next_tokens.install()

    @classmethod
    def canvas_spec(
        cls, model_config: ModelConfig, settings: PluginSettings, canvases: DiffusionConfig
    ) -> CanvasSpec:
        published = cls.published_rule(model_config, settings)
        rule = published.rule()
        max_steps, of_rule = denoising_settings(
            settings, canvases.max_denoising_steps, rule, published_settings(model_config)
        )
        length = canvas_length(settings, canvases.canvas_length, published.draft_length)
        layout = (published.layout or FreeCanvas)(length)
        return CanvasSpec.of(layout, rule, max_steps, of_rule)


@replaces_call(
    "vllm.entrypoints.openai.decisions.state:select_read_strategy",
    reason="vLLM reads decisions off a canvas of this architecture, and a server without one does not start.",
    until="vLLM asks whether the model is served as a diffusion model.",
)
def _decisions_of_next_tokens(stock: Any, model_config: Any, *args: Any) -> Any:
    """In the autoregressive mode decisions are Gemma 4's, read off the next token."""
    is_ours = model_config.architecture == "DiffusionGemmaForBlockDiffusion"
    if is_ours and not model_config.is_diffusion:
        model_config = SimpleNamespace(
            architecture="Gemma4ForConditionalGeneration", logprobs_mode=model_config.logprobs_mode
        )
    return stock(model_config, *args)


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
