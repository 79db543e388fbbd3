"""Options of ``vllm serve`` that a diffusion model cannot honour, refused by name before it loads.

At some of them vLLM would end with a stack trace before it asks this package about the model: those
are checked with the arguments, the others with the whole configuration. The conditions that are
more than a field are here, the sentences in ``refused_options.toml``.
"""

from __future__ import annotations

import functools
import json
import logging
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.startup.plan import DiffusionPlan
from vllm_diffusion.startup.plugin_settings import plugin_settings
from vllm_diffusion.startup.unserved_models import (
    check_other_model,
    classes_of_code,
    unserved_by_class,
)
from vllm_diffusion.weights.adapters.support import UNREACHED
from vllm_diffusion.weights.machine_fit import quantises_while_loading
from vllm_diffusion.weights.weight_files import checkpoint_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.vllm_diffusion")


@dataclass(frozen=True)
class ServedNames:
    """Names by which a checkpoint is known to be of one of our families.

    Attributes:
        architectures: Architectures of the models to check.
        by_type: Architectures that are served, for each ``model_type`` whose configuration is ours.
        by_code: The architecture that is served, for each class that only ``auto_map`` may name.
        of_text_model: The architecture that is served, for each of a text model saved by itself.
        beside_adapter: The architecture that is served, for each that a checkpoint with an adapter
            of drafts names.
    """

    architectures: frozenset[str]
    by_type: Mapping[str, tuple[str, ...]]
    by_code: Mapping[str, str]
    of_text_model: Mapping[str, str]
    beside_adapter: Mapping[str, str]


@functools.cache
def _entries() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("refused_options.toml").read_text(encoding="utf-8")
    entries: dict[str, Any] = tomllib.loads(text)
    return {
        name: {"sentence": entry} if isinstance(entry, str) else entry
        for name, entry in entries.items()
    }


def sentences() -> dict[str, str]:
    """Return the sentences by the option's name; ``{...}`` in one stands for a value."""
    return {name: entry["sentence"] for name, entry in _entries().items()}


def checked_fields() -> dict[str, dict[str, Any]]:
    """Return the entries of options whose field of vLLM's configuration is checked by its value
    alone, by the option's name.
    """
    return {name: entry for name, entry in _entries().items() if "field" in entry}


def refusal(name: str, **values: object) -> str:
    """Return the message with which an option is refused.

    Args:
        name: Name of the option.
        values: Values for the message's placeholders.
    """
    return sentences()[name].format(**values)


def unserved_checkpoint(arguments: EngineArgs, names: ServedNames) -> str | None:
    """Return the message for a checkpoint of one of our families, or that seems to be, where vLLM
    ends with a list of all that it knows.

    Args:
        arguments: Arguments from which vLLM could not make a model's configuration.
        names: Names of what is served.

    Returns:
        The message; ``None`` if the failure has another reason.
    """
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(arguments.model, revision=arguments.revision)
    except Exception:
        return None
    if isinstance(arguments.hf_overrides, dict):
        config = config | arguments.hf_overrides
    if names.architectures.isdisjoint(config.get("architectures") or []):
        return _unknown_architecture(config, names)
    return _unknown_quantization(config)


def _unknown_quantization(config: Mapping[str, Any]) -> str | None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    parts = (config, config.get("text_config") or {})
    settings = next((one for part in parts if (one := part.get("quantization_config"))), None)
    method = (settings or {}).get("quant_method")
    if method is None or method in QUANTIZATION_METHODS:
        return None
    return (
        f"quantization_config in config.json of the checkpoint has quant_method={method!r}, which the installed "
        "vLLM does not serve; if the tensors are whole, as after an adapter was merged, remove "
        "quantization_config there, otherwise serve the checkpoint that was quantised, or one in FP8 or NVFP4 "
        "(docs/use/quantization.md)."
    )


def _unknown_architecture(config: dict[str, Any], names: ServedNames) -> str | None:
    from vllm.model_executor.models import ModelRegistry

    served = names.by_type
    model_type, architectures = str(config.get("model_type")), config.get("architectures") or []
    for architecture in architectures:
        if (whole := names.of_text_model.get(architecture)) is not None:
            return (
                f"config.json of the checkpoint has architectures={architectures!r}, the text model of {whole} that was "
                "saved by itself, which is not served; save the whole model, or put its config.json there, if "
                "the tensors have the whole model's names, and start with --language-model-only."
            )
    known = ModelRegistry.get_supported_archs()
    if (unserved := unserved_by_class(config)) is not None:
        return unserved
    if model_type not in served or any(architecture in known for architecture in architectures):
        return None
    problem = f"config.json of the checkpoint has model_type={model_type!r} with architectures={architectures!r}"
    if not served[model_type]:
        return f"{problem}, of which none is served; docs/use/families.md has what is."
    overrides = json.dumps({"architectures": served[model_type][:1]})
    return (
        f"{problem}, and of that model_type {' and '.join(served[model_type])} alone is served. If layers, "
        f"weights and loop are the same, say so with --hf-overrides '{overrides}'; otherwise "
        "docs/develop/add-a-family.md states what it takes."
    )


EARLY_CONDITIONS: dict[str, Callable[[EngineArgs, ModelConfig], object]] = {
    "--pipeline-parallel-size": lambda arguments, model: arguments.pipeline_parallel_size > 1,
    "--enable-eplb": lambda arguments, model: arguments.enable_eplb,
    # vLLM's workers refuse it with a stack trace, and its command line drops settings without the
    # flag.
    "--enable-fault-tolerance": lambda arguments, model: (
        (
            arguments.enable_fault_tolerance
            or arguments.fault_tolerance_config != type(arguments.fault_tolerance_config)()
        )
        and arguments.all2all_backend not in ("deepep_low_latency", "nixl_ep")
    ),
    "--model-impl": lambda arguments, model: arguments.model_impl not in ("auto", "vllm"),
    "--disable-sliding-window": lambda arguments, model: (
        arguments.disable_sliding_window
        and getattr(model.hf_text_config, "sliding_window", None) is not None
    ),
}


def install(names: ServedNames) -> None:
    """Check the arguments as soon as vLLM has the model's configuration. This is safe to call
    twice.

    Args:
        names: Names of the models to check.
    """
    _looking.install(names)


@replaces_call(
    "vllm.engine.arg_utils:EngineArgs.create_model_config",
    reason="Refuses options at which vLLM ends with a trace; notes limits that the operator set.",
    until="verify_and_update_config is called with the arguments, before any option is applied to the model.",
)
def _looking(
    stock: Callable[[EngineArgs], ModelConfig],
    names: ServedNames,
    self: Any,
) -> ModelConfig:
    # vLLM removes the window from a configuration before its architecture is known.
    disables_window, self.disable_sliding_window = self.disable_sliding_window, False
    try:
        model_config = stock(self)
    except Exception:
        sentence = unserved_checkpoint(self, names)
        if sentence is None:
            raise
        raise ValueError(sentence) from None
    finally:
        self.disable_sliding_window = disables_window
    if (found := _meant_architecture(self, model_config, names)) is not None:
        meant, sign = found
        # Such a folder may be an adapter for requests, beside weights of the class that is named.
        is_guess = meant in names.beside_adapter.values()
        logger.log(
            logging.WARNING if is_guess else logging.INFO,
            'config.json names %s, and %s: %s serves it. --hf-overrides with "architectures" chooses another class.',
            model_config.architecture,
            sign,
            meant,
        )
        self.hf_overrides = {**(self.hf_overrides or {}), "architectures": [meant]}
        model_config = stock(self)
    served = getattr(model_config.hf_config, "architectures", None) or ()
    is_ours = not names.architectures.isdisjoint(served)
    if is_ours:
        for name, is_set in EARLY_CONDITIONS.items():
            if is_set(self, model_config):
                raise ValueError(refusal(name))
    elif not model_config.is_diffusion:
        check_other_model(model_config)
    if disables_window:
        model_config = stock(self)
    if is_ours or model_config.is_diffusion:
        # vLLM replaces None by a default before it asks this package about the model.
        model_config.diffusion = DiffusionPlan(
            plugin_settings(self.additional_config),
            sets_max_num_seqs=self.max_num_seqs is not None,
            sets_max_num_batched_tokens=self.max_num_batched_tokens is not None,
        )
    return model_config


def _meant_architecture(
    arguments: EngineArgs, model_config: ModelConfig, names: ServedNames
) -> tuple[str, str] | None:
    """Return the architecture of a checkpoint that names another's in ``architectures``, and what
    tells; ``None`` for any other checkpoint, or if the operator names one.
    """
    overrides, named = arguments.hf_overrides or {}, model_config.architecture
    if not isinstance(overrides, Mapping) or "architectures" in overrides:
        return None
    for name in classes_of_code(getattr(model_config.hf_config, "auto_map", None)):
        if (meant := names.by_code.get(name)) not in (None, named):
            return meant, "auto_map the diffusion model that it is"
    meant = names.beside_adapter.get(named)
    if meant and checkpoint_file(model_config, "adapter", "adapter_config.json") is not None:
        return meant, "adapter/adapter_config.json is a LoRA with which the model drafts"
    return None


# Connectors of vLLM that carry blocks of the cache no further than this machine's memory.
_OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_SCHEDULERS = "vllm_diffusion.scheduling.canvas_scheduler"
# Weight transfer by which a draft of an autoregressive model comes.
DRAFT_TRANSFER = "safetensors"


def check_options(vllm_config: VllmConfig) -> None:
    """Refuse options that would fail later, or would be ignored in silence.

    Raises:
        ValueError: With the option's message.
    """
    for name, entry in checked_fields().items():
        value = _field(vllm_config, entry["field"])
        if value not in entry["allowed"] if "allowed" in entry else value:
            raise ValueError(refusal(name, **vars(vllm_config)))
    for name, is_set in CONDITIONS.items():
        if is_set(vllm_config):
            values = vars(vllm_config) | {
                "two_canvases": 2 * _canvas_length(vllm_config),
                "logits_processors": ", ".join(_logits_processors(vllm_config)),
                "lora_target_modules": ", ".join(_targets_out_of_reach(vllm_config)),
                "kv_cache_dtypes": " or ".join(_cache_dtypes(vllm_config)),
            }
            raise ValueError(refusal(name, **values))
    if _offloads_cache(vllm_config) and _takes_images(vllm_config):
        raise ValueError(
            "--kv-offloading-size lets clients send embeddings in place of images, which DiffusionGemma does "
            "not take; add --language-model-only, or leave it out."
        )


def _field(config: Any, path: str) -> Any:
    """Return a field of the configuration, ``None`` within a part that is not there."""
    for name in path.split("."):
        config = None if config is None else getattr(config, name)
    return config


def _canvas_length(vllm_config: VllmConfig) -> int:
    """Return the rows that a canvas adds to a pass; 0 where a pass holds a whole sequence
    anyway.
    """
    if vllm_config.model_config.diffusion.spec.layout.recomputes:
        return 0
    return vllm_config.diffusion_config.canvas_length


def _logits_processors(vllm_config: VllmConfig) -> list[str]:
    """List logits processors, which need whole rows of logits; these never exist here."""
    named = [str(processor) for processor in vllm_config.model_config.logits_processors or ()]
    return named + [point.value for point in entry_points(group="vllm.logits_processors")]


def _is_foreign_scheduler(vllm_config: VllmConfig) -> bool:
    scheduler_config = vllm_config.scheduler_config
    if scheduler_config.scheduler_cls is None:
        return False
    chosen: Any = scheduler_config.get_scheduler_cls()
    # A factory of ours, or a class that is made of one of ours.
    classes = chosen.__mro__ if isinstance(chosen, type) else (chosen,)
    return all(each.__module__ != _SCHEDULERS for each in classes)


def _cache_dtypes(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Formats of the KV cache that our attention reads; that of others is theirs to check."""
    backend = vllm_config.attention_config.backend
    if backend.name != "CUSTOM":
        return (vllm_config.cache_config.cache_dtype,)
    return tuple(backend.get_class().supported_kv_cache_dtypes)


def _targets_out_of_reach(vllm_config: VllmConfig) -> list[str]:
    targets = getattr(vllm_config.lora_config, "target_modules", None) or ()
    return [name for name in targets if not UNREACHED.keys().isdisjoint(name.split("."))]


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _connector(vllm_config: VllmConfig) -> str | None:
    transfer = vllm_config.kv_transfer_config
    return None if transfer is None else transfer.kv_connector


def _offloads_cache(vllm_config: VllmConfig) -> bool:
    """Return true if blocks of the cache move to this machine's memory and back."""
    size = vllm_config.cache_config.kv_offloading_size
    return size is not None or _connector(vllm_config) in _OFFLOADING


def _copies_from_a_gpu(vllm_config: VllmConfig) -> bool:
    """Return true for an offloaded cache, but by a specification outside vLLM, which copies by
    itself.
    """
    transfer = vllm_config.kv_transfer_config
    extra = (transfer and transfer.kv_connector_extra_config) or {}
    return _offloads_cache(vllm_config) and not extra.get("spec_module_path")


def _takes_images(vllm_config: VllmConfig) -> bool:
    """Return true if clients may send embeddings in place of images, as they may wherever a cache
    is loaded.
    """
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is not None and not multimodal.language_model_only


def _brings_no_weights(vllm_config: VllmConfig) -> bool:
    """Return true for a transfer that needs GPUs where there is none, and for that of drafts."""
    transfer = vllm_config.weight_transfer_config
    return transfer is not None and (transfer.backend == DRAFT_TRANSFER or _is_cpu())


def _cuts_canvases(vllm_config: VllmConfig) -> bool:
    threshold = vllm_config.scheduler_config.long_prefill_token_threshold
    return 0 < threshold < _canvas_length(vllm_config)


def _schedules_too_little(vllm_config: VllmConfig) -> bool:
    budget = vllm_config.scheduler_config.max_num_scheduled_tokens
    return budget is not None and budget < 2 * _canvas_length(vllm_config)


# Conditions in the order of their checks: the option that asks for most first.
CONDITIONS: dict[str, Callable[[VllmConfig], object]] = {
    "--logits-processors": _logits_processors,
    "--enable-expert-parallel": (
        lambda config: (
            config.parallel_config.enable_expert_parallel and not config.model_config.is_moe
        )
    ),
    "--all2all-backend": (
        lambda config: (
            config.parallel_config.all2all_backend != "allgather_reducescatter" and _is_cpu()
        )
    ),
    "--enable-mixed-moe-lora-format": (
        lambda config: (
            _field(config, "lora_config.enable_mixed_moe_lora_format")
            or _field(config, "lora_config.enable_moe_shared_loras")
        )
    ),
    "--lora-target-modules": _targets_out_of_reach,
    "--quantization": lambda config: _is_cpu() and quantises_while_loading(config.model_config),
    "--jit-monitor-mode": lambda config: config.observability_config.jit_monitor_mode == "error",
    "--kv-offloading-size": lambda config: _copies_from_a_gpu(config) and _is_cpu(),
    "--kv-transfer-config": (lambda config: _connector(config) not in (None, *_OFFLOADING)),
    "--offload-group-size": (
        lambda config: config.offload_config.prefetch.offload_group_size > 0 and _is_cpu()
    ),
    "--weight-transfer-config": _brings_no_weights,
    "--kv-cache-dtype": (
        lambda config: config.cache_config.cache_dtype not in _cache_dtypes(config)
    ),
    "--scheduler-cls": _is_foreign_scheduler,
    "--max-num-scheduled-tokens": _schedules_too_little,
    "--long-prefill-token-threshold": _cuts_canvases,
    "--max-model-len": (lambda config: config.model_config.max_model_len <= _canvas_length(config)),
    "--max-num-batched-tokens": (
        lambda config: config.scheduler_config.max_num_batched_tokens < 2 * _canvas_length(config)
    ),
}


def choose_worker(given: str, worker: str) -> str:
    """Choose the class of the workers, or check the operator's.

    Args:
        given: ``--worker-cls``.
        worker: Path of our class.

    Raises:
        ValueError: If the operator's class does not derive from ours.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    # A configuration is checked again in each process; our class need not be imported for that.
    if given in ("auto", worker):
        return worker
    bases = resolve_obj_by_qualname(given).__mro__
    if worker not in {f"{base.__module__}.{base.__qualname__}" for base in bases}:
        raise ValueError(
            f"--worker-cls {given} has no model runner for canvases; derive it "
            f"from {worker}, or leave it out and use --worker-extension-cls."
        )
    return given
