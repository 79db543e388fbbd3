"""Options of ``vllm serve`` that a diffusion model cannot honour, refused by name before it loads.

The conditions that are more than a field are here, the sentences in ``refused_options.toml``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm_diffusion.startup.refused_options import refusal, refused_fields
from vllm_diffusion.weights.adapters.rules import UNREACHED
from vllm_diffusion.weights.transfer import WEIGHT_TRANSFER

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_SCHEDULERS = "vllm_diffusion.scheduling.canvas_scheduler"


def check_options(vllm_config: VllmConfig) -> None:
    """Refuse options that would fail later, or would be ignored in silence.

    Raises:
        ValueError: With the option's message.
    """
    for name, path in refused_fields().items():
        if _field(vllm_config, path):
            raise ValueError(refusal(name))
    for name, is_set in CONDITIONS.items():
        if is_set(vllm_config):
            raise ValueError(refusal(name, **vars(vllm_config), **_values(vllm_config)))


def _field(config: Any, path: str) -> Any:
    """Return a field of the configuration, ``None`` within a part that is not there."""
    for name in path.split("."):
        config = None if config is None else getattr(config, name)
    return config


def _values(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return values for the sentences' placeholders that are no fields of the configuration."""
    return {
        "num_layers": _num_layers(vllm_config),
        "two_canvases": 2 * _canvas_length(vllm_config),
        "logits_processors": ", ".join(_logits_processors(vllm_config)),
        "lora_target_modules": ", ".join(_targets_out_of_reach(vllm_config)),
        "kv_cache_dtypes": " or ".join(_cache_dtypes(vllm_config)),
    }


def _canvas_length(vllm_config: VllmConfig) -> int:
    return vllm_config.diffusion_config.canvas_length


def _num_layers(vllm_config: VllmConfig) -> int:
    return vllm_config.model_config.get_total_num_hidden_layers()


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


def _quantises_while_loading(vllm_config: VllmConfig) -> bool:
    model_config = vllm_config.model_config
    is_quantised = model_config.model_arch_config.quantization_config is not None
    return model_config.quantization is not None and not is_quantised


def _is_foreign_cache(vllm_config: VllmConfig) -> bool:
    return vllm_config.cache_config.cache_dtype not in _cache_dtypes(vllm_config)


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


def _transfers_between_gpus(vllm_config: VllmConfig) -> bool:
    """Return true for a weight transfer of vLLM's own; ours reads files."""
    transfer = vllm_config.weight_transfer_config
    return transfer is not None and transfer.backend != WEIGHT_TRANSFER


def _cuts_canvases(vllm_config: VllmConfig) -> bool:
    threshold = vllm_config.scheduler_config.long_prefill_token_threshold
    return 0 < threshold < _canvas_length(vllm_config)


def _schedules_too_little(vllm_config: VllmConfig) -> bool:
    budget = vllm_config.scheduler_config.max_num_scheduled_tokens
    return budget is not None and budget < 2 * _canvas_length(vllm_config)


# Conditions in the order of their checks: the option that asks for most first.
CONDITIONS: dict[str, Callable[[VllmConfig], object]] = {
    # vLLM still offers this one, which ends the engine at the first request.
    "--structured-outputs-config.backend": (
        lambda config: config.structured_outputs_config.backend == "lm-format-enforcer"
    ),
    "--logits-processors": _logits_processors,
    "--pipeline-parallel-size": (
        lambda config: config.parallel_config.pipeline_parallel_size > _num_layers(config)
    ),
    "--distributed-executor-backend": (
        lambda config: (
            config.parallel_config.distributed_executor_backend == "external_launcher"
            and config.parallel_config.pipeline_parallel_size > 1
        )
    ),
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
    "--decode-context-parallel-size": (
        lambda config: config.parallel_config.decode_context_parallel_size > 1
    ),
    "--prefill-context-parallel-size": (
        lambda config: config.parallel_config.prefill_context_parallel_size > 1
    ),
    "--enable-mixed-moe-lora-format": (
        lambda config: (
            _field(config, "lora_config.enable_mixed_moe_lora_format")
            or _field(config, "lora_config.enable_moe_shared_loras")
        )
    ),
    "--lora-target-modules": _targets_out_of_reach,
    "--per-request-spec-decode-metrics": (
        lambda config: config.observability_config.per_request_spec_decode_metrics != "none"
    ),
    "--quantization": _quantises_while_loading,
    "--runner": lambda config: config.model_config.runner_type != "generate",
    "--jit-monitor-mode": lambda config: config.observability_config.jit_monitor_mode == "error",
    "--kv-offloading-size": (
        lambda config: config.cache_config.kv_offloading_size is not None and _is_cpu()
    ),
    "--offload-group-size": (
        lambda config: config.offload_config.prefetch.offload_group_size > 0 and _is_cpu()
    ),
    "--weight-transfer-config": lambda config: _transfers_between_gpus(config) and _is_cpu(),
    "--kv-cache-dtype": _is_foreign_cache,
    "--scheduler-cls": _is_foreign_scheduler,
    "--max-num-scheduled-tokens": _schedules_too_little,
    "--long-prefill-token-threshold": _cuts_canvases,
    "--max-model-len": (lambda config: config.model_config.max_model_len <= _canvas_length(config)),
    "--max-num-batched-tokens": (
        lambda config: config.scheduler_config.max_num_batched_tokens < 2 * _canvas_length(config)
    ),
}
