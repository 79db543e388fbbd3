"""The self-check of a server's ranks: the first of each kind of GPU decides for all of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_diffusion.kernel_choice.cases import Served
from vllm_diffusion.kernel_choice.self_check import NothingRightError, checked_choices
from vllm_diffusion.startup.engine_process import leave
from vllm_diffusion.startup.kernel_choices import KernelChoices
from vllm_diffusion.startup.plan import plan_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")


def gpu_name(device: int) -> str:
    """Return a GPU's name, with its compute capability, without a context on it.

    Args:
        device: vLLM's index of the GPU.
    """
    from vllm.platforms import current_platform

    name = current_platform.get_device_name(device)
    capability = current_platform.get_device_capability(device)
    return (
        name if capability is None else f"{name} (compute capability {capability.as_version_str()})"
    )


def decide(vllm_config: VllmConfig, local_rank: int) -> KernelChoices | None:
    """Check the kernels on this rank's GPU, before anything of it is used.

    Args:
        vllm_config: Configuration of the engine.
        local_rank: Rank among the workers of this engine on this machine.

    Returns:
        The choices; ``None`` where another rank decides for this one.

    Raises:
        NothingRightError: If no implementation of a kernel is right.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    plan = plan_of(vllm_config)
    choices, mode = plan.kernels, plan.settings.self_check
    if mode == "off" or not current_platform.is_cuda():
        return choices
    parallel = vllm_config.parallel_config
    devices = [parallel.get_local_gpu_index(rank) for rank in range(local_rank + 1)]
    names = [gpu_name(device) for device in devices]
    if names[-1] in names[:-1]:
        return None
    visible = current_platform.logical_device_id_to_visible_device_id(devices[-1])
    try:
        return checked_choices(
            Served.of(vllm_config, choices),
            device=f"cuda:{visible}",
            gpu=names[-1],
            folder=Path(envs.VLLM_CACHE_ROOT),
            forgets=mode == "always",
        )
    except NothingRightError as error:
        leave(plan.refusal_path, str(error))
        raise


def agree(vllm_config: VllmConfig, local_rank: int, own: KernelChoices | None) -> KernelChoices:
    """Return the choices of the first rank with this rank's kind of GPU; every rank must call this.

    Args:
        vllm_config: Configuration of the engine.
        local_rank: As for :func:`decide`.
        own: Result of :func:`decide`.
    """
    from vllm.distributed import get_world_group

    group = get_world_group()
    name = gpu_name(vllm_config.parallel_config.get_local_gpu_index(local_rank))
    gathered: list[tuple[str, KernelChoices | None]] = [(name, own)] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(gathered, (name, own), group=group.cpu_group)
    decided = [choices for gpu, choices in gathered if gpu == name and choices is not None]
    return decided[0]
