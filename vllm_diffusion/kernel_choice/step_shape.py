"""Shape of a denoising step, which a process can take that has not imported vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.decoding.layouts import FreeCanvas
from vllm_diffusion.startup.kernel_choices import DEFAULT_KERNELS, KernelChoices

# Settings of the shipped checkpoint's rule.
SETTINGS = {
    "entropy_bound": 0.1,
    "confidence_threshold": 0.005,
    "stability_threshold": 1,
    "t_min": 0.4,
    "t_max": 0.8,
}


def free_canvas(length: int) -> CanvasSpec:
    """Describe DiffusionGemma's canvases of some length."""
    return CanvasSpec(FreeCanvas(length), EntropyBound(), 48, SETTINGS)


@dataclass(frozen=True)
class StepShape:
    """Shape of the model and of the server, as far as sampling goes.

    Attributes:
        spec: Canvases and their rule.
        vocab: Ids of the vocabulary.
        hidden: Hidden size.
        slots: Requests that run at once.
        softcap: Cap of the logits; ``None`` without one.
        dtype: Name of the weights' dtype in torch.
        is_self_conditioned: True if steps leave soft embeddings.
        kernels: Implementations.
        compiler: Backend of ``torch.compile``; ``None`` for none.
    """

    spec: CanvasSpec = field(default_factory=lambda: free_canvas(256), repr=False)
    vocab: int = 262144
    hidden: int = 2816
    slots: int = 32
    softcap: float | None = 30.0
    dtype: str = "bfloat16"
    is_self_conditioned: bool = True
    kernels: KernelChoices = DEFAULT_KERNELS
    compiler: str | None = None
