"""Check that this machine can run a checkpoint's format."""

from __future__ import annotations

from typing import Any

from vllm_diffusion.weights.read_config import read_format


def check_platform(model: str, quantization: dict[str, Any] | None) -> None:
    """Refuse FP4 on a machine that can neither run nor emulate it.

    Raises:
        ValueError: Naming the checkpoint, the platform and what can be served instead.
    """
    quantized = None if quantization is None else read_format(quantization)
    if quantized is None or not quantized.is_fp4:
        return
    from vllm.platforms import current_platform

    # Every NVIDIA GPU that this torch runs on (7.5 and above) has a kernel of vLLM's for it.
    if current_platform.is_cuda() or current_platform.is_rocm() or _is_ours(current_platform):
        return
    platform = current_platform.device_name or "this platform"
    raise ValueError(
        f"The weights of {model} are NVFP4 ({quantized.name}), which this machine can neither run "
        f"nor emulate: vLLM has no kernel for it on {platform}. Serve the FP8 or BF16 checkpoint "
        "here, or use the ordinary vLLM wheel without an accelerator, where FP4 is emulated."
    )


def _is_ours(platform: Any) -> bool:
    return type(platform).__name__ == "DiffusionCpuPlatform"
