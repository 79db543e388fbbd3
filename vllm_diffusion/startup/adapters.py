"""Rules for LoRA adapters, made when a checkpoint is configured with ``--enable-lora``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_diffusion.weights.adapters import early_checks
from vllm_diffusion.weights.adapters.rules import AdapterRules, adapted_modules
from vllm_diffusion.weights.tensor_rules import TensorRules

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def choose_adapter_rules(vllm_config: VllmConfig, tensors: TensorRules) -> None:
    """Store the rules of adapters where the API process and the workers read them.

    Nothing happens without ``--enable-lora``.

    Args:
        vllm_config: Configuration whose ``model_config`` is given ``adapter_rules``.
        tensors: Tensor rules of the checkpoint's family.

    Raises:
        ValueError: Naming ``--lora-modules``, if one of its adapters does not fit.
    """
    lora_config = vllm_config.lora_config
    if lora_config is None:
        return
    # vLLM resolves --lora-dtype later, in the same way.
    lora_config.verify_with_model_config(vllm_config.model_config)
    targets = lora_config.target_modules
    rules = vllm_config.model_config.adapter_rules = AdapterRules(
        adapted_modules(tensors, vllm_config.model_config.hf_config),
        max_rank=lora_config.max_lora_rank,
        target_modules=None if targets is None else tuple(targets),
        no_experts=_why_no_experts(vllm_config),
        largest=torch.finfo(lora_config.lora_dtype).max,
    )
    early_checks.check_command_line(rules)
    early_checks.install()


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
