"""Checks and choices when a diffusion checkpoint is configured, before it is loaded.

vLLM calls :meth:`BlockDiffusionEngineConfig.verify_and_update_config` for our architectures only.
Every ``ValueError`` here reaches the user before a weight is read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import CanvasLayout
from vllm_diffusion.decoding.rule import AUTOREGRESSIVE, LINEAR_SPEC, DecodingRule
from vllm_diffusion.hooks import upstream
from vllm_diffusion.startup import engine_process
from vllm_diffusion.startup.async_scheduling import TYPICAL_STEPS, choose_async_scheduling
from vllm_diffusion.startup.attention import choose_attention
from vllm_diffusion.startup.cuda_graphs import choose_capture_sizes
from vllm_diffusion.startup.environment import (
    await_engine_at_shutdown,
    limit_answers,
    limit_pictures,
)
from vllm_diffusion.startup.machine import (
    check_shared_memory,
    checkpoint_bytes,
    is_vllm_cpu_build,
)
from vllm_diffusion.startup.mask_token import warn_of_another_mask
from vllm_diffusion.startup.options import check_options, choose_worker
from vllm_diffusion.startup.pass_limits import (
    choose_encoder_room,
    choose_media,
    default_max_num_seqs,
)
from vllm_diffusion.startup.plan import DiffusionPlan
from vllm_diffusion.startup.plugin_settings import OPTION, PluginSettings
from vllm_diffusion.weights.adapters.early_checks import adapter_support
from vllm_diffusion.weights.checkpoint_tensors import BodyTensors, CheckpointTensors
from vllm_diffusion.weights.formats import read_format
from vllm_diffusion.weights.machine_fit import (
    check_capability,
    check_package,
    check_platform,
    check_room,
)
from vllm_diffusion.weights.regular_files import check_regular_files
from vllm_diffusion.weights.weight_files import (
    check_weight_files,
    choose_weight_files,
)

if TYPE_CHECKING:
    from vllm.config import (
        CacheConfig,
        DiffusionConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

logger = logging.getLogger("vllm.vllm_diffusion")

# Block sizes of the KV cache are multiples of this (CanvasAttentionBackend).
_KERNEL_BLOCK = 16
SCHEDULER = "vllm_diffusion.scheduling.canvas_scheduler.canvas_scheduler"
# The worker on a GPU; the CPU platform has its own.
WORKER = "vllm_diffusion.runner.canvas_worker.CanvasWorker"


@dataclass(frozen=True)
class PublishedRule:
    """A decoding rule of a family.

    Attributes:
        rule: Factory of the rule; for a masked family its argument is the mask token.
        settings: Settings published with the checkpoints, by name.
        layout: Layout of canvases with this rule; ``None`` for the family's own.
        draft_length: Positions of a draft, where canvases are drafts; ``None`` for the checkpoint's
            canvas.
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

    # Functions of folders that import this one, which the plugin puts here: what guards a server's
    # paths and what an API process needs for canvases. Each is safe to call twice.
    guard_server: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    install_api: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    # What a family defines.

    # Rules by the value of the setting ``rule``; the first is the default.
    rules: ClassVar[Mapping[str, PublishedRule]]
    # Class of ``transformers`` that has the tensors of a checkpoint, where there is no `tensors`.
    body: ClassVar[str]
    # Names and shapes of the tensors of the family's checkpoints, where they are others.
    tensors: ClassVar[CheckpointTensors | None] = None
    # True if the weights are also those of an ordinary causal model, served with `AUTOREGRESSIVE`.
    has_autoregressive_mode: ClassVar[bool] = False

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
        """Apply what vLLM would choose for the causal architecture that the autoregressive mode
        runs.
        """

    @classmethod
    def default_max_num_seqs(cls, scheduler: SchedulerConfig, most: int, length: int) -> int:
        """Return how many requests run at once if the operator sets no number.

        Args:
            scheduler: Configuration with the rows of a pass.
            most: vLLM's default for other models.
            length: Rows of a canvas.
        """
        return default_max_num_seqs(scheduler, most, length)

    @classmethod
    def canvas_spec(
        cls, model_config: ModelConfig, settings: PluginSettings, canvases: DiffusionConfig
    ) -> CanvasSpec:
        """Make the description of canvases, with the settings of requests that set none.

        Args:
            model_config: Configuration of the checkpoint.
            settings: The operator's.
            canvases: Positions of a canvas at most, and the step cap that the operator sets, if
                any.
        """
        raise NotImplementedError

    # Derived from the family's values.

    @classmethod
    def checkpoint_tensors(cls) -> CheckpointTensors:
        """Return names and shapes of the tensors of the family's checkpoints."""
        return cls.tensors or BodyTensors(cls.body)

    @classmethod
    def chosen_rule(cls, model_config: ModelConfig, settings: PluginSettings) -> str:
        """Return the name of the rule that the operator sets, or of the checkpoint's own."""
        return settings.rule or cls.default_rule(model_config)

    @classmethod
    def published_rule(cls, model_config: ModelConfig, settings: PluginSettings) -> PublishedRule:
        """Return the rule that the operator sets, or the checkpoint's own.

        Raises:
            ValueError: If the family does not have it.
        """
        chosen = cls.chosen_rule(model_config, settings)
        if chosen not in cls.rules:
            names = " or ".join(f'"{name}"' for name in cls.rule_names())
            raise ValueError(
                f"{OPTION}: rule={chosen!r} is not known for this model; leave it out or set it to "
                f"{names}."
            )
        return cls.rules[chosen]

    @classmethod
    def canvases_by_request(
        cls, model_config: ModelConfig, settings: PluginSettings, canvases: DiffusionConfig
    ) -> CanvasSpec:
        """Make the description of canvases, of each way to decode that requests may choose.

        Args:
            model_config: Configuration of the checkpoint.
            settings: The operator's.
            canvases: As for :meth:`canvas_spec`.

        Raises:
            ValueError: If ``rules`` are none of this model's, or leave out its own or the default.
        """
        if settings.rules is None:
            chosen = cls.chosen_rule(model_config, settings)
            spec = cls.canvas_spec(model_config, settings, canvases)
            return replace(spec, ways=(replace(spec.ways[0], name=chosen),))
        own = next(iter(cls.rules))
        known = tuple(dict.fromkeys((own, LINEAR_SPEC, AUTOREGRESSIVE)))
        if not set(known) <= set(cls.rule_names()):
            raise ValueError(
                f"{OPTION}: rules={settings.rules!r} is not supported by this model, which has one decoding rule; "
                "leave it out."
            )
        chosen_from = known if settings.rules == "all" else settings.rules
        names = tuple(name for name in known if name in chosen_from)
        if len(names) != len(chosen_from):
            raise ValueError(
                f'{OPTION}: rules={settings.rules!r} must list some of {", ".join(known)}, each once, or be "all".'
            )
        default = cls.chosen_rule(model_config, settings)
        for name in (own, default):
            if name not in names:
                raise ValueError(
                    f"{OPTION}: rules={settings.rules!r} must include {name!r}; add it, or leave rules out."
                )
        of_own = replace(settings, rule=own)
        if own != LINEAR_SPEC:
            # Requests have the settings of diffusion: there is one value of each.
            of_own = replace(of_own, draft_length=None, draft_steps=None, draft_adapter=None)
            settings = replace(settings, max_denoising_steps=None, preset=None, of_rule={})
        of_drafts = replace(settings, rule=LINEAR_SPEC)
        diffusion = cls.canvas_spec(model_config, of_own, canvases)
        drafts = cls.canvas_spec(model_config, of_drafts, canvases)
        (denoised,), (verified,) = diffusion.ways, drafts.ways
        ways = {
            own: replace(denoised, name=own),
            LINEAR_SPEC: replace(verified, name=LINEAR_SPEC),
            AUTOREGRESSIVE: replace(verified, name=AUTOREGRESSIVE, denoises=False),
        }
        return replace(
            diffusion,
            ways=tuple(ways[name] for name in names),
            settings={**drafts.settings, **diffusion.settings},
            default_way=names.index(default),
        )

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
        _check_installation(cls.registration_failure)
        model_config = vllm_config.model_config
        check_regular_files(Path(model_config.model))
        cls.guard_server()
        await_engine_at_shutdown()
        if cls.is_in_vllm:
            logger.info(
                "%s: using vllm-diffusion's class; VLLM_DIFFUSION_DISABLE=1 selects vLLM's own of "
                "the same name.",
                model_config.architecture,
            )
        plan = model_config.diffusion
        chosen = cls.chosen_rule(model_config, plan.settings)
        is_causal = chosen == AUTOREGRESSIVE and plan.settings.rules is None
        # By the setting ``rule`` vLLM serves an ordinary causal model; a request may choose it
        # beside canvases.
        if is_causal and cls.has_autoregressive_mode:
            _serve_autoregressively(vllm_config)
            cls.apply_autoregressive_defaults(vllm_config)
        else:
            check_capability()
            cls.check_model(model_config)
            plan = cls._plan_canvases(plan, vllm_config)
        cls.install_api()
        _check_weights(vllm_config)
        model_config.diffusion = replace(
            plan,
            adapters=adapter_support(vllm_config, cls.checkpoint_tensors()),
            refusal_path=engine_process.refusal_path() or plan.refusal_path,
        )

    @classmethod
    def _plan_canvases(cls, plan: DiffusionPlan, vllm_config: VllmConfig) -> DiffusionPlan:
        """Decide how canvases are served, and write into the configuration what vLLM has fields
        for.

        Args:
            plan: Plan with the operator's settings and limits.
            vllm_config: Configuration, changed in place.

        Raises:
            ValueError: Naming what is wrong, and the remedy.
        """
        from vllm.platforms import current_platform

        model_config, settings = vllm_config.model_config, plan.settings
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        # Set before vLLM's own choice for Gemma 4, which leaves a back end that is set alone.
        attention = vllm_config.attention_config
        attention.backend = choose_attention(attention.backend, settings.attention)
        # vLLM's choices for DiffusionGemma lower it.
        max_num_seqs = scheduler.max_num_seqs
        cls.apply_stock_defaults(vllm_config)

        canvases = vllm_config.diffusion_config
        assert canvases is not None
        spec = cls.canvases_by_request(model_config, settings, canvases)
        canvases.canvas_length = length = spec.length
        _check_spec(spec, model_config, attention.backend.name, settings.attention)
        _set_block_size(vllm_config.cache_config, spec.layout.alignment)
        if vllm_config.cache_config.enable_prefix_caching and spec.layout.recomputes:
            logger.info(
                "prefix caching is off: keys and values of a prompt depend on what follows it."
            )
            vllm_config.cache_config.enable_prefix_caching = False
        plan = replace(
            plan,
            spec=spec,
            own_attention=attention.backend.name == "CUSTOM",
        )

        scheduler.max_num_seqs = (
            max_num_seqs
            if plan.sets_max_num_seqs
            else cls.default_max_num_seqs(scheduler, max_num_seqs, length)
        )
        model_config.diffusion = plan
        is_set = plan.sets_max_num_batched_tokens
        choose_media(model_config, scheduler.max_num_batched_tokens, is_set)
        if spec.layout.has_spans:
            choose_encoder_room(model_config, scheduler, length)
        if spec.mask_token_id is not None:
            warn_of_another_mask(model_config, spec.mask_token_id)
        check_options(vllm_config)
        # Where an image's rows attend to one another in both directions, they must be in one pass.
        # Elsewhere a pass ends with a block, not before an image.
        scheduler.disable_chunked_mm_input = model_config.is_mm_prefix_lm
        scheduler.scheduler_cls = scheduler.scheduler_cls or SCHEDULER
        if scheduler.async_scheduling is None:
            scheduler.async_scheduling = choose_async_scheduling(
                min(TYPICAL_STEPS, spec.max_denoising_steps),
                # The encode of a canvas takes a pass of its own in the asynchronous order.
                extra=int(plan.order(is_async=False).encode_with_step),
                bytes_of_rank=checkpoint_bytes(model_config.model) / parallel.tensor_parallel_size,
            )
        if not current_platform.is_cpu():
            parallel.worker_cls = choose_worker(parallel.worker_cls, WORKER)
        if spec.layout.has_one_length:
            # A pass of whole sequences is not a number of canvases: vLLM's own sizes are as good.
            compilation = vllm_config.compilation_config
            compilation.cudagraph_capture_sizes = choose_capture_sizes(
                compilation, scheduler, length
            )
        limit_pictures()
        if (most := limit_answers()) is not None:
            logger.info(
                "A request may ask for up to %d answers (n); set VLLM_MAX_N_SEQUENCES for another "
                "limit.",
                most,
            )
        return plan


def _serve_autoregressively(vllm_config: VllmConfig) -> None:
    """Turn the configuration into that of an ordinary model; nothing read it before this hook.

    Raises:
        ValueError: Naming a setting of canvases.
    """
    section = vllm_config.additional_config.get("diffusion", {})
    others = [name for name in section if name != "rule"]
    if vllm_config.diffusion_config is not None:
        others.append("--diffusion-config")
    if others:
        raise ValueError(
            f"{OPTION}: {others[0]} cannot be combined with rule={AUTOREGRESSIVE!r}, with which vLLM serves an "
            "ordinary causal model without canvases; leave one of them out."
        )
    model_config = vllm_config.model_config
    model_config.hf_config.canvas_length = None
    # vLLM has cached the property.
    model_config.__dict__.pop("is_diffusion", None)
    # vLLM's own, with grammars of ours.
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = scheduler.scheduler_cls or SCHEDULER
    logger.info(
        "rule=%r: vLLM serves this checkpoint as an ordinary causal model, with its own scheduler, "
        "sampler and attention.",
        AUTOREGRESSIVE,
    )


def _check_weights(vllm_config: VllmConfig) -> None:
    model_config = vllm_config.model_config
    if vllm_config.load_config.load_format != "dummy":
        check_weight_files(model_config.model)
        choose_weight_files(vllm_config)
    quantization = model_config.model_arch_config.quantization_config
    if quantization is not None:
        nvfp4 = read_format(quantization)
        check_package(quantization)
        check_platform(model_config.model, nvfp4)
    if model_config.is_diffusion:
        check_room(vllm_config)


def _check_installation(failure: Exception | None) -> None:
    """Refuse a vLLM that this package does not serve with.

    Args:
        failure: Error of the registration with vLLM, if it failed.
    """
    from vllm import envs

    # First, since what vLLM is depends on the platform.
    if envs.VLLM_TARGET_DEVICE == "cpu" and not is_vllm_cpu_build():
        # With it vLLM loads no plugin's platform.
        raise ValueError(
            "VLLM_TARGET_DEVICE=cpu selects vLLM's compiled CPU platform, which the installed vLLM "
            "was built without; unset VLLM_TARGET_DEVICE, and the CPU platform of vllm-diffusion "
            "serves where there is no GPU."
        )
    problem = upstream.problem()
    if problem is None and failure is not None:
        problem = (
            f"vllm-diffusion could not register itself with vLLM {upstream.installed_version()} "
            f"({type(failure).__name__}: {failure}): reinstall vLLM with {upstream.INSTALL}, or set "
            "VLLM_DIFFUSION_DISABLE=1 to serve with stock vLLM alone."
        )
    if problem is not None:
        raise ValueError(problem)
    check_shared_memory()


def _check_spec(spec: CanvasSpec, model_config: ModelConfig, backend: str, own: str) -> None:
    """Refuse canvases that the checkpoint, its length or the attention does not go with.

    Args:
        spec: Description of canvases.
        model_config: Configuration of the checkpoint.
        backend: vLLM's name of the attention back end; ``"CUSTOM"`` is this package's.
        own: The setting ``attention``.
    """
    mask, vocab_size = spec.mask_token_id, model_config.get_vocab_size()
    if mask is not None and not (type(mask) is int and 0 <= mask < vocab_size):
        if getattr(model_config.hf_config, "mask_token_id", None) is None:
            raise ValueError(
                f"config.json of the checkpoint names no mask_token_id, and that of the published model, {mask}, is not "
                f"below vocab_size={vocab_size}; name the checkpoint's with "
                """--hf-overrides '{"mask_token_id": N}'."""
            )
        raise ValueError(
            f"mask_token_id={mask!r} of the checkpoint must be an integer of at least 0 and below "
            f"vocab_size={vocab_size}; correct it in config.json."
        )
    length, max_model_len = spec.layout.alignment, model_config.max_model_len
    if max_model_len % length:
        raise ValueError(
            f"max_model_len={max_model_len} is not a multiple of this model's block length, {length}; "
            f"set --max-model-len to {max_model_len // length * length}."
        )
    if spec.layout.has_spans and backend != "CUSTOM":
        raise ValueError(
            f"--attention-backend {backend} cannot serve this model, whose known tokens attend in both "
            f"directions within blocks of {spec.length}; leave it unset."
        )
    if spec.layout.has_spans and own == "cute":
        raise ValueError(
            'The setting attention="cute" does not support known tokens that attend in both directions, as '
            f'in this model\'s blocks of {spec.length}; set attention to "triton".'
        )


def _set_block_size(cache_config: CacheConfig, alignment: int) -> None:
    """Make blocks of the cache whole blocks of the model, where canvases are blocks."""
    if cache_config.user_specified_block_size and cache_config.block_size % _KERNEL_BLOCK:
        raise ValueError(
            f"--block-size {cache_config.block_size} is not a multiple of {_KERNEL_BLOCK}, by which attention reads "
            "the cache; leave it out, or set such a multiple."
        )
    if alignment == 1:
        return
    whole = math.lcm(alignment, _KERNEL_BLOCK)
    if not cache_config.user_specified_block_size:
        cache_config.block_size = whole
        cache_config.user_specified_block_size = True
    elif cache_config.block_size % alignment:
        # A block of the cache that ends within one of the model's would be found by another prompt,
        # with keys and values that saw what stood after it here.
        raise ValueError(
            f"--block-size {cache_config.block_size} is not a multiple of this model's blocks of "
            f"{alignment}; leave it unset or set it to {whole}."
        )
