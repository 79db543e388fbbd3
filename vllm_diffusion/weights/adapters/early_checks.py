"""Refusal of LoRA adapters in the API process, before the engine loads them.

At the start, the adapters of ``--lora-modules`` are checked; while a server runs, requests for an
adapter whose files have changed since: a worker that cannot load it in the middle of a batch would
end the engine. :mod:`vllm_diffusion.live.http` checks what clients ask a server to load. What the
model supports, which workers read too, is collected here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.weights.adapters.support import AdapterSupport, adapted_modules
from vllm_diffusion.weights.checkpoint_tensors import CheckpointTensors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Only vLLM's own commands import it.
_COMMAND = "vllm.entrypoints.common.cli_args"
# Name and path of each adapter on this process's command line.
_named: list[tuple[Any, Any]] = []


def note_command_line() -> None:
    """Record the adapters that vLLM's parser reads from ``--lora-modules``. This is safe to call
    twice.

    vLLM does not pass them on before the model is loaded.
    """
    if _COMMAND in sys.modules:
        _noting.install()


@replaces_call(
    "vllm.entrypoints.common.cli_args:LoRAParserAction.__call__",
    reason="Notes the adapters of the command line, to check them before a start.",
    until="EngineArgs or VllmConfig hold --lora-modules.",
)
def _noting(stock: Any, self: Any, parser: Any, namespace: Any, *args: Any) -> None:
    stock(self, parser, namespace, *args)
    _named[:] = [(module.name, module.path) for module in getattr(namespace, self.dest)]


def check_command_line(support: AdapterSupport) -> None:
    """Check the adapters of this process's command line, once.

    Raises:
        ValueError: Naming the option, what is wrong and what to do.
    """
    named = _named.copy()
    _named.clear()
    for name, path in named:
        if not isinstance(name, str) or not isinstance(path, str):
            raise ValueError(
                f"--lora-modules: name={name!r} and path={path!r} must both be strings; give name=path, or "
                'JSON like {"name": "poet", "path": "/adapters/poet"}.'
            )
        try:
            support.check(path)
        except ValueError as error:
            raise ValueError(f"--lora-modules {name}={path}: {error}") from None


def check_request(lora_request: Any, model_config: Any) -> None:
    """Refuse a request whose adapter could not be loaded again, which would end the engine.

    Raises:
        VLLMValidationError: Naming the adapter and what is wrong with it.
    """
    from vllm.exceptions import VLLMValidationError

    support = support_of(model_config)
    if lora_request is None or support is None:
        return
    try:
        support.check(lora_request.lora_path)
    except ValueError as error:
        raise VLLMValidationError(
            f"model {lora_request.lora_name!r}: {error}",
            parameter="model",
            value=lora_request.lora_name,
        ) from None


def support_of(model_config: Any) -> AdapterSupport | None:
    """Return which adapters a model takes, by the plan of its start; ``None`` if it takes none."""
    return getattr(getattr(model_config, "diffusion", None), "adapters", None)


def adapter_support(vllm_config: VllmConfig, tensors: CheckpointTensors) -> AdapterSupport | None:
    """Collect which adapters a server takes, and check those of the command line.

    Args:
        vllm_config: Configuration of the server.
        tensors: Tensors of the family's checkpoints.

    Returns:
        What is supported; ``None`` without ``--enable-lora``.

    Raises:
        ValueError: Naming ``--lora-modules``, if one of its adapters does not fit.
    """
    lora_config = vllm_config.lora_config
    if lora_config is None:
        return None
    # vLLM resolves --lora-dtype later, in the same way.
    lora_config.verify_with_model_config(vllm_config.model_config)
    targets, no_experts = lora_config.target_modules, _why_no_experts(vllm_config)
    support = AdapterSupport(
        adapted_modules(tensors, vllm_config.model_config.hf_config),
        max_rank=lora_config.max_lora_rank,
        target_modules=None if targets is None else tuple(targets),
        no_experts=no_experts,
        largest=torch.finfo(lora_config.lora_dtype).max,
    )
    check_command_line(support)
    return support


def _why_no_experts(vllm_config: VllmConfig) -> str:
    """Return why adapters cannot adapt experts; empty if they can.

    Only the CPU platform is checked: on a GPU vLLM's own layers refuse what they do not support.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    if vllm_config.model_config.model_arch_config.quantization_config is not None:
        return (
            "experts of a quantised checkpoint are not adapted on the CPU; train the adapter without "
            "them, or serve the checkpoint in BF16"
        )
    parallel = vllm_config.parallel_config
    if vllm_config.lora_config.fully_sharded_loras and parallel.tensor_parallel_size > 1:
        return (
            "experts are not adapted with --fully-sharded-loras on the CPU; leave the option out, or "
            "train the adapter without them"
        )
    if parallel.data_parallel_size > 1:
        # Experts get the rows of all engines, but each engine knows only the adapters of its own
        # rows.
        return (
            "experts that several engines share are not adapted on the CPU; leave "
            "--data-parallel-size out, or train the adapter without them"
        )
    return ""
