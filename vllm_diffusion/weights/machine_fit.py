"""Check from the configuration and the files' headers alone that this machine can hold and run a
checkpoint.

That a GPU is too small vLLM finds out in the engine's process, and ends with a stack trace.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.weights.formats import FLOATS, read_format, without_emulation
from vllm_diffusion.weights.weight_files import stored_tensors, weight_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def check_package(settings: dict[str, Any]) -> None:
    """Refuse torchao's weights where its package is missing; vLLM's own formats need none.

    Args:
        settings: ``quantization_config`` of the checkpoint.

    Raises:
        ValueError: Naming the package.
    """
    if settings.get("quant_method") == "torchao" and find_spec("torchao") is None:
        raise ValueError(
            "quantization_config in config.json of the checkpoint has quant_method='torchao', which needs a package "
            "that is not installed; run pip install 'torchao>=0.10.0', or serve the checkpoint that was "
            "quantised, or one in FP8 or NVFP4 (docs/use/quantization.md)."
        )


def check_platform(model: str, nvfp4: str | None) -> None:
    """Refuse FP4 on a machine that can neither run nor emulate it.

    Args:
        model: Name of the checkpoint.
        nvfp4: The config's name for NVFP4; ``None`` for any other format.

    Raises:
        ValueError: Naming the checkpoint, the platform and what can be served instead.
    """
    if nvfp4 is None:
        return
    from vllm.platforms import current_platform

    # Every NVIDIA GPU that this torch runs on (7.5 and above) has a kernel of vLLM's for it.
    is_ours = type(current_platform).__name__ == "DiffusionCpuPlatform"
    if current_platform.is_cuda() or current_platform.is_rocm() or is_ours:
        return
    platform = current_platform.device_name or "this platform"
    raise ValueError(
        f"The weights of {model} are NVFP4 ({nvfp4}), which this machine can neither run "
        f"nor emulate: vLLM has no kernel for it on {platform}. Serve the FP8 or BF16 checkpoint "
        "here, or use the ordinary vLLM wheel without an accelerator, where FP4 is emulated."
    )


def check_emulation(model: str, settings: dict[str, Any]) -> None:
    """Refuse quantised weights that nothing on the CPU platform computes with.

    vLLM loads some of them, and ends at the first request.

    Args:
        model: Name of the checkpoint of a model or a draft.
        settings: Its quantization config.

    Raises:
        ValueError: Naming the checkpoint, the format and what can be served instead.
    """
    read_format(settings)
    name = without_emulation(settings)
    if name is not None:
        raise ValueError(
            f"The weights of {model} are quantised as {name}, which is not emulated on the CPU: serve it on a "
            "GPU, or serve the BF16, FP8 or NVFP4 checkpoint here."
        )


# Tensor cores for bfloat16, which every kernel here is compiled for.
OLDEST = (8, 0)


def check_capability() -> None:
    """Refuse an NVIDIA GPU of a compute capability below 8.0.

    Raises:
        ValueError: Naming the GPU, its compute capability and what serves instead.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is not None and capability < OLDEST:
        raise ValueError(
            f"This GPU ({current_platform.get_device_name()}) has compute capability "
            f"{capability.as_version_str()}, and diffusion models need 8.0 or above: serve on an A100, "
            "an RTX 30 or newer, or set VLLM_DIFFUSION_CPU=1 to serve on the CPU."
        )


def check_room(vllm_config: VllmConfig) -> None:
    """Refuse weights that are larger than the memory which vLLM may take of an NVIDIA GPU.

    Args:
        vllm_config: Configuration of the server.

    Raises:
        ValueError: Naming both sizes in GiB and the remedies.
    """
    from vllm.platforms import current_platform

    offload = vllm_config.offload_config
    if (
        not current_platform.is_cuda()
        or offload.uva.cpu_offload_gb
        or offload.prefetch.offload_group_size
        # The file has other numbers than the GPU will hold.
        or quantises_while_loading(vllm_config.model_config)
    ):
        return
    parallel = vllm_config.parallel_config
    needed = weight_bytes(vllm_config.model_config)
    ranks = parallel.tensor_parallel_size
    if parallel.enable_expert_parallel:
        ranks *= parallel.data_parallel_size
    cache_config = vllm_config.cache_config
    memory = current_platform.get_device_total_memory()
    # With a cache of a given size, vLLM counts no share.
    share = 1.0 if cache_config.kv_cache_memory_bytes else cache_config.gpu_memory_utilization
    if needed / ranks > memory * share:
        raise ValueError(
            f"The weights take {needed / ranks / 2**30:.1f} GiB of each GPU, and this one "
            f"({current_platform.get_device_name()}) has {memory / 2**30:.1f} GiB, of which vLLM may take "
            f"{memory * share / 2**30:.1f} (--gpu-memory-utilization): serve a checkpoint in a smaller format "
            "(docs/operate/small-gpus.md), on a larger GPU, or on several with --tensor-parallel-size."
        )


def quantises_while_loading(model_config: ModelConfig) -> bool:
    """Return true if ``--quantization`` rounds a checkpoint in floats."""
    is_quantised = model_config.model_arch_config.quantization_config is not None
    return model_config.quantization is not None and not is_quantised


def weight_bytes(model_config: ModelConfig) -> int:
    """Return the bytes that all ranks hold of a checkpoint's weights, at least.

    A vision tower is left out, since a server may do without.

    Args:
        model_config: Names a folder, or a repository of the hub, whose headers are read.
    """
    stored = _described(model_config.model, model_config.revision)
    itemsize = model_config.dtype.itemsize
    return sum(
        math.prod(shape) * itemsize if dtype in FLOATS else size
        for name, (dtype, shape, size) in stored.items()
        if "vision" not in name
    )


def _described(model: str, revision: str | None) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return safetensors' dtype, shape and bytes of each tensor; none where they cannot be read."""
    if Path(model).is_dir():
        return {
            one.name: (one.dtype, one.shape, one.end - one.begin)
            for one in stored_tensors(weight_files(Path(model)))
        }
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    described = get_safetensors_params_metadata(model, revision=revision)
    return {
        name: (one["dtype"], tuple(one["shape"]), one["data_offsets"][1] - one["data_offsets"][0])
        for name, one in described.items()
    }
