"""Check that this GPU is new enough for the kernels and large enough for the weights, before anything is loaded.

vLLM finds either out in the engine's process, when it loads or compiles, and ends with a stack trace.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vllm_diffusion.weights.check import expected_specs
from vllm_diffusion.weights.formats import FLOATS, Spec
from vllm_diffusion.weights.read_config import read_format
from vllm_diffusion.weights.tensor_rules import TensorRules, split_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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


def check_room(
    vllm_config: VllmConfig, rules: TensorRules, specs: dict[str, Spec] | None = None
) -> None:
    """Refuse weights that are larger than the memory which vLLM may take of an NVIDIA GPU.

    Args:
        vllm_config: Configuration of the server.
        rules: Names and shapes of a checkpoint's tensors.
        specs: Tensors that the checkpoint was found to hold, if it was read.

    Raises:
        ValueError: Naming both sizes in GiB and the remedies.
    """
    from vllm.platforms import current_platform

    offload = vllm_config.offload_config
    if (
        not current_platform.is_cuda()
        or offload.uva.cpu_offload_gb
        or offload.prefetch.offload_group_size
    ):
        return
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if specs is None:
        quantization = model_config.model_arch_config.quantization_config
        specs = described_specs(model_config.hf_config, rules, quantization)
    needed = weight_bytes(specs, model_config.dtype.itemsize)
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
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


def described_specs(
    config: Any, rules: TensorRules, quantization: dict[str, Any] | None
) -> dict[str, Spec]:
    """Return the tensors of a checkpoint by its configuration; none of a format that is not known here.

    Args:
        config: transformers' configuration of the checkpoint.
        rules: Names and shapes of its tensors.
        quantization: Its quantization config, or ``None``.
    """
    shapes = rules.shapes(config)
    if quantization is None:
        return expected_specs(shapes, None, rules)
    quantized = read_format(quantization)
    return {} if quantized is None else expected_specs(split_experts(shapes), quantized, rules)


def weight_bytes(specs: dict[str, Spec], itemsize: int) -> int:
    """Return the bytes that all ranks hold of a checkpoint's weights, at least.

    A vision tower is left out, since a server may do without, and so are scales beyond a weight's
    format.

    Args:
        specs: The checkpoint's tensors.
        itemsize: Bytes of an element that is not quantised.
    """
    return sum(
        math.prod(allowed[0]) * (itemsize if dtypes == FLOATS else 1)
        for name, (dtypes, allowed) in specs.items()
        if "vision" not in name
    )
