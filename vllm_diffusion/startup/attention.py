"""Choice of the attention back end that serves a diffusion model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_diffusion.startup.options import refusal

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

logger = logging.getLogger("vllm.vllm_diffusion")

_BACKEND = "vllm_diffusion.attention.backend.CanvasAttentionBackend"


def register_attention() -> None:
    """Put our back end into vLLM's slot for out-of-tree ones, unless another plugin's is there.

    Every process that builds a model must call this: the configuration travels to engines and
    workers, but the registry does not. Other models never see the slot, since nothing but its name
    leads to it.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)


def choose_attention(chosen: AttentionBackendEnum | None, setting: str) -> AttentionBackendEnum:
    """Choose our back end unless the operator asks for another that can serve a canvas.

    Args:
        chosen: ``--attention-backend``.
        setting: The setting ``attention``.

    Raises:
        ValueError: If the requested back end cannot, if it contradicts the setting ``attention``,
            or if another plugin took our back end's slot.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    able = [AttentionBackendEnum.CUSTOM]
    if not current_platform.is_cpu():
        # The back ends of vLLM that take a causal flag per sequence.
        able += [AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.FLASH_ATTN]
    chosen = chosen or AttentionBackendEnum.CUSTOM
    if chosen not in able:
        raise ValueError(
            refusal(
                "--attention-backend",
                backend=chosen.name,
                able=" or ".join(backend.name for backend in able),
            )
        )
    if chosen == AttentionBackendEnum.CUSTOM:
        # The back end of another plugin does not support canvases.
        if (path := AttentionBackendEnum.CUSTOM.get_path()) != _BACKEND:
            raise ValueError(
                f"Another plugin registered its attention ({path}) under vLLM's CUSTOM, where "
                "vllm-diffusion registers its own, and vLLM has only one; leave that plugin out "
                "of VLLM_PLUGINS."
            )
    else:
        if setting != "auto":
            raise ValueError(
                f"--attention-backend {chosen.name} runs vLLM's own kernels, which the setting "
                "attention does not reach; leave one of the two unset."
            )
        logger.warning(
            "--attention-backend %s differs from the reference implementation in two ways: the "
            "sliding window of a canvas row follows the row (as with window_anchor=query), and "
            "image tokens attend causally.",
            chosen.name,
        )
    if setting == "cute":
        from attention_kernels.canvas_attention.cute.launch import HEAD_DIMS

        # On a GPU that FlashAttention-4 supports, layers for which it has no kernel run Triton.
        capability = current_platform.get_device_capability()
        if capability is None or capability.major not in HEAD_DIMS:
            raise ValueError(
                'The setting attention="cute" needs a GPU of compute capability 9.x or 10.x; set '
                'attention to "triton", or leave it out.'
            )
    return chosen
