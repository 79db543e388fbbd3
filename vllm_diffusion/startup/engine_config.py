"""Checks and choices when a diffusion checkpoint is configured, before it is loaded.

vLLM calls :meth:`BlockDiffusionEngineConfig.verify_and_update_config` for our architectures only.
Every ``ValueError`` here reaches the user before a weight is read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import AlignedBlock, CanvasLayout
from vllm_diffusion.decoding.rule import DecodingRule
from vllm_diffusion.hooks import upstream
from vllm_diffusion.startup import engine_process
from vllm_diffusion.startup.attention import choose_attention
from vllm_diffusion.startup.capture_sizes import choose_capture_sizes
from vllm_diffusion.startup.checkpoint_file import choose_weight_files
from vllm_diffusion.startup.denoising_settings import (
    Published,
    choose_draft_length,
    denoising_settings,
    generation_config,
)
from vllm_diffusion.startup.environment import await_engine_at_shutdown, limit_answers
from vllm_diffusion.startup.machine import is_vllm_cpu_build
from vllm_diffusion.startup.options import check_options
from vllm_diffusion.startup.pass_limits import choose_media, set_max_num_seqs
from vllm_diffusion.startup.pass_order import choose_scheduler, choose_worker
from vllm_diffusion.startup.plugin_settings import OPTION, plugin_settings
from vllm_diffusion.startup.published_runs import log_differences
from vllm_diffusion.weights.adapters.early_checks import choose_adapter_rules
from vllm_diffusion.weights.check import check_capability, check_platform, check_room
from vllm_diffusion.weights.tensor_rules import TensorRules
from vllm_diffusion.weights.weight_files import check_regular_files, check_weight_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")

# Block sizes of the KV cache are multiples of this (CanvasAttentionBackend).
_KERNEL_BLOCK = 16
# Value of the setting ``rule`` with which vLLM serves the checkpoint as an ordinary causal model.
AUTOREGRESSIVE = "autoregressive"
# Of a GPU; the CPU platform has its own.
WORKER = "vllm_diffusion.runner.worker.CanvasWorker"


@dataclass(frozen=True)
class PublishedRule:
    """A decoding rule of a family.

    Attributes:
        rule: Factory of the rule; for a masked family its argument is the mask token.
        settings: Settings published with the checkpoints, by name.
        layout: Layout of canvases with this rule; ``None`` for the family's own.
        draft_length: Positions of a draft, where canvases are drafts; ``None`` for the checkpoint's canvas.
    """

    rule: Callable[..., DecodingRule]
    settings: Mapping[str, float | str] = field(default_factory=dict)
    layout: type[CanvasLayout] | None = None
    draft_length: int | None = None


class BlockDiffusionEngineConfig:
    """Checks and choices for any block-diffusion checkpoint.

    vLLM calls two class methods of the entry in its table of architectures; a family's entry
    derives from this class and overrides what is particular to the family.
    """

    # Error of a failed registration; it is reported when one of the family's checkpoints is
    # configured.
    registration_failure: ClassVar[Exception | None] = None
    # True if vLLM has a class of its own for the architecture; ``None`` before registration.
    is_in_vllm: ClassVar[bool | None] = None

    # Functions of folders that import this one, which the plugin puts here: what guards a server's paths
    # and what an API process needs for canvases. Each is safe to call twice.
    guard_server: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    install_api: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    # What a family says of itself.

    # Rules by the value of the setting ``rule``; the first is the default.
    rules: ClassVar[Mapping[str, PublishedRule]]
    # True if the weights are also those of an ordinary causal model, served with `AUTOREGRESSIVE`.
    has_autoregressive_mode: ClassVar[bool] = False
    # True if a step reads the soft embeddings of the previous step.
    is_self_conditioned: ClassVar[bool] = False

    @classmethod
    def rule_names(cls) -> tuple[str, ...]:
        """Return the allowed values of the setting ``rule``, the default first."""
        return (*cls.rules, *([AUTOREGRESSIVE] if cls.has_autoregressive_mode else []))

    @classmethod
    def default_rule(cls, model_config: ModelConfig) -> str:
        """Return the rule that a checkpoint is served with if the operator sets none."""
        return next(iter(cls.rules))

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        """Refuse a model configuration with invalid values, the canvas length among them."""
        raise NotImplementedError

    @classmethod
    def apply_stock_defaults(cls, vllm_config: VllmConfig) -> None:
        """Apply vLLM's own choices for the architecture, and set the canvas length."""
        from vllm.config.diffusion import DiffusionConfig

        if vllm_config.diffusion_config is None:
            canvas_length = vllm_config.model_config.hf_config.canvas_length
            vllm_config.diffusion_config = DiffusionConfig(canvas_length=canvas_length)

    @classmethod
    def apply_autoregressive_defaults(cls, vllm_config: VllmConfig) -> None:
        """Apply what vLLM chooses for the architecture whose weights the autoregressive mode runs."""

    @classmethod
    def canvas_spec(cls, vllm_config: VllmConfig) -> CanvasSpec:
        """Make the description of canvases, with the settings of requests that set none."""
        raise NotImplementedError

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        """Return the rules for names and shapes of a checkpoint's tensors."""
        raise NotImplementedError

    # Derived from the family's values.

    @classmethod
    def chosen_rule(cls, vllm_config: VllmConfig) -> str:
        """Return the name of the rule that the operator sets, or of the checkpoint's own."""
        chosen = plugin_settings(vllm_config).rule
        return cls.default_rule(vllm_config.model_config) if chosen is None else chosen

    @classmethod
    def published_rule(cls, vllm_config: VllmConfig) -> PublishedRule:
        """Return the rule that the operator sets, or the checkpoint's own.

        Raises:
            ValueError: If the family does not have it.
        """
        chosen = cls.chosen_rule(vllm_config)
        if chosen not in cls.rules:
            names = " or ".join(f'"{name}"' for name in cls.rule_names())
            raise ValueError(
                f"{OPTION}: rule={chosen!r} is not known for this model; leave it out or set it to "
                f"{names}."
            )
        return cls.rules[chosen]

    # Called by vLLM.

    @classmethod
    def verify_and_update_model_config(cls, model_config: ModelConfig) -> None:
        """Do nothing, since our checks need the whole configuration."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Check everything that can be checked before a weight is read, and choose what is unset.

        Raises:
            ValueError: Naming what is wrong, and the remedy.
        """
        from vllm import envs
        from vllm.platforms import current_platform

        # First, since what vLLM is depends on the platform.
        if envs.VLLM_TARGET_DEVICE == "cpu" and not is_vllm_cpu_build():
            # With it vLLM loads no plugin's platform.
            raise ValueError(
                "VLLM_TARGET_DEVICE=cpu selects vLLM's compiled CPU platform, which the installed vLLM "
                "was built without; unset VLLM_TARGET_DEVICE, and the CPU platform of vllm-diffusion "
                "serves where there is no GPU."
            )
        _check_upstream(cls.registration_failure)
        check_regular_files(Path(vllm_config.model_config.model))
        cls.guard_server()
        await_engine_at_shutdown()
        if cls.is_in_vllm:
            logger.info(
                "%s: vllm-diffusion's class runs; vLLM brings one of the same name, which "
                "VLLM_DIFFUSION_DISABLE=1 has run in its place.",
                vllm_config.model_config.architecture,
            )
        if plugin_settings(vllm_config).rule == AUTOREGRESSIVE and cls.has_autoregressive_mode:
            _serve_autoregressively(vllm_config)
            cls.apply_autoregressive_defaults(vllm_config)
            _check_weights(vllm_config)
            choose_adapter_rules(vllm_config, cls.tensor_rules())
            return
        check_capability()
        cls.check_model(vllm_config.model_config)
        choose_attention(vllm_config)
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        cls.apply_stock_defaults(vllm_config)
        rule = cls.published_rule(vllm_config)
        choose_draft_length(vllm_config, rule.layout, rule.draft_length)
        set_max_num_seqs(vllm_config, max_num_seqs)
        # The configuration carries it to the API process, the scheduler and the workers.
        spec = vllm_config.model_config.canvas_spec = cls.canvas_spec(vllm_config)
        _check_mask(vllm_config.model_config, spec)
        _check_blocks(vllm_config, spec)
        backend, own = (
            vllm_config.attention_config.backend.name,
            plugin_settings(vllm_config).attention,
        )
        if (problem := spec.layout.attention_problem(backend, own)) is not None:
            raise ValueError(problem)
        check_options(vllm_config)
        choose_media(vllm_config)
        _check_weights(vllm_config)
        check_room(vllm_config)
        choose_adapter_rules(vllm_config, cls.tensor_rules())
        choose_scheduler(vllm_config)
        if not current_platform.is_cpu():
            choose_worker(vllm_config.parallel_config, WORKER)
        choose_capture_sizes(vllm_config)
        cls._check_skipping(vllm_config)
        engine_process.prepare_engine(vllm_config.model_config)
        if (most := limit_answers()) is not None:
            logger.info(
                "A request may ask for up to %d answers (n); set VLLM_MAX_N_SEQUENCES for another "
                "limit.",
                most,
            )
        cls.install_api()

    @classmethod
    def _check_skipping(cls, vllm_config: VllmConfig) -> None:
        """Refuse ``skip_unlikely`` where it has no effect, or would break batch invariance."""
        from vllm import envs

        if not plugin_settings(vllm_config).skip_unlikely:
            return
        if not cls.is_self_conditioned:
            raise ValueError(
                f"{OPTION}: skip_unlikely is of soft embeddings, which this model has none of; leave "
                "it out."
            )
        if envs.VLLM_BATCH_INVARIANT:
            raise ValueError(
                f"{OPTION}: skip_unlikely does not go with VLLM_BATCH_INVARIANT, which has a kernel of "
                "vLLM's multiply soft embeddings; leave one of them out."
            )


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


def _serve_autoregressively(vllm_config: VllmConfig) -> None:
    """Turn the configuration into that of an ordinary model; nothing read it before this hook.

    Raises:
        ValueError: Naming a setting of canvases.
    """
    section = vllm_config.additional_config["diffusion"]
    others = [name for name in section if name != "rule"]
    if others:
        raise ValueError(
            f"{OPTION}: {others[0]} does not go with rule={AUTOREGRESSIVE!r}, by which vLLM serves an "
            "ordinary causal model without canvases; leave one of them out."
        )
    if vllm_config.diffusion_config is not None:
        raise ValueError(
            f"--diffusion-config does not go with rule={AUTOREGRESSIVE!r} of {OPTION}, by which vLLM "
            "serves an ordinary causal model without canvases; leave one of them out."
        )
    model_config = vllm_config.model_config
    model_config.hf_config.canvas_length = None
    # vLLM has cached the property.
    model_config.__dict__.pop("is_diffusion", None)
    logger.info(
        "rule=%r: vLLM serves this checkpoint as an ordinary causal model, with its own scheduler, "
        "sampler and attention.",
        AUTOREGRESSIVE,
    )


def _check_weights(vllm_config: VllmConfig) -> None:
    model_config = vllm_config.model_config
    quantization = model_config.model_arch_config.quantization_config
    check_platform(model_config.model, quantization)
    if vllm_config.load_config.load_format != "dummy":
        check_weight_files(model_config.model)
        choose_weight_files(vllm_config)


def _check_upstream(failure: Exception | None) -> None:
    problem = upstream.problem()
    if problem is None and failure is not None:
        problem = (
            f"vllm-diffusion could not register itself with vLLM {upstream.installed_version()} "
            f"({type(failure).__name__}: {failure}): reinstall vLLM with {upstream.INSTALL}, or set "
            "VLLM_DIFFUSION_DISABLE=1 to serve with stock vLLM alone."
        )
    if problem is not None:
        raise ValueError(problem)


def _check_mask(model_config: ModelConfig, spec: CanvasSpec) -> None:
    mask, vocab_size = spec.mask_token_id, model_config.get_vocab_size()
    if mask is not None and not (type(mask) is int and 0 <= mask < vocab_size):
        raise ValueError(
            f"mask_token_id={mask!r} of the checkpoint must be an integer of at least 0 and below "
            f"vocab_size={vocab_size}; correct it in config.json."
        )


def _check_blocks(vllm_config: VllmConfig, spec: CanvasSpec) -> None:
    """Check that the model length and blocks of the cache are whole blocks if canvases are blocks."""
    if spec.layout.alignment == 1:
        return
    length, max_model_len = spec.layout.alignment, vllm_config.model_config.max_model_len
    if max_model_len % length:
        raise ValueError(
            f"max_model_len={max_model_len} is no whole number of this model's blocks of {length}; "
            f"set --max-model-len to {max_model_len // length * length}."
        )
    cache_config = vllm_config.cache_config
    if cache_config.user_specified_block_size and cache_config.block_size % length:
        # A block of the cache that ends within one of the model's would be found by another prompt,
        # with keys and values that saw what stood behind it here.
        raise ValueError(
            f"--block-size {cache_config.block_size} is no multiple of this model's blocks of "
            f"{length}; leave it unset or set it to {math.lcm(length, _KERNEL_BLOCK)}."
        )
    if not cache_config.user_specified_block_size:
        cache_config.block_size = math.lcm(length, _KERNEL_BLOCK)
        cache_config.user_specified_block_size = True
