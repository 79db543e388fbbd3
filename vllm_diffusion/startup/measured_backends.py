"""Back ends of products that a measurement found faster than vLLM's choice, where the operator
names none.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm_diffusion.weights.formats import read_format

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")

# Time over that of vLLM's choice that a back end may have at most, at the rows of one canvas and of
# eight.
MOST_AT_256, MOST_AT_2048 = 0.9, 1.0


@dataclass(frozen=True)
class MeasuredBackend:
    """A back end that was measured beside vLLM's choice, on one card.

    Attributes:
        weights: Format of the weights, as :func:`format_of` names it.
        capability: Compute capability of the card.
        card: Name of the card, as PyTorch has it.
        products: ``"moe"`` for experts, ``"linear"`` for linear layers.
        backend: Value of ``--moe-backend`` or ``--linear-backend``.
        at_256: Its time at 256 rows, over that of vLLM's choice.
        at_2048: The same at 2,048 rows.
        source: File of the measurement, from the repository's root, and its rows.
    """

    weights: str
    capability: tuple[int, int]
    card: str
    products: Literal["moe", "linear"]
    backend: str
    at_256: float
    at_2048: float
    source: str

    @property
    def pays(self) -> bool:
        """True if it is faster by a tenth at 256 rows, and no slower at 2,048."""
        return self.at_256 <= MOST_AT_256 and self.at_2048 <= MOST_AT_2048


# Empty until something is measured: python benchmarks/gpu/campaign.py run --only products-cutlass
# products-humming
MEASURED: tuple[MeasuredBackend, ...] = ()


def format_of(model_config: ModelConfig) -> str | None:
    """Return a name of the weights' format, by which kernels differ; ``None`` for one that is not
    known here.

    It is the dtype of weights in floats, and else the format with what shares a scale, as
    ``"float-quantized, channel"``.
    """
    settings = model_config.model_arch_config.quantization_config
    if settings is None:
        return str(model_config.dtype).removeprefix("torch.")
    quantized = read_format(settings)
    if quantized is None:
        return None
    groups = (settings.get("config_groups") or {}).values()
    shared = {str(weights["strategy"]) for group in groups if (weights := group.get("weights"))}
    return ", ".join([quantized.name, *sorted(shared)])


def choose_backends(vllm_config: VllmConfig) -> None:
    """Set the back ends that were measured faster on this card; what the operator names stays.

    Args:
        vllm_config: Configuration, changed in place.
    """
    from vllm.platforms import current_platform

    if not MEASURED or not current_platform.is_cuda():
        return
    kernels, weights = vllm_config.kernel_config, format_of(vllm_config.model_config)
    card, capability = current_platform.get_device_name(), current_platform.get_device_capability()
    is_free = {
        "moe": kernels.moe_backend == "auto",
        "linear": kernels.linear_backend == "auto" and kernels.linear_backend_per_quant is None,
    }
    chosen = []
    for row in MEASURED:
        here = (row.weights, row.capability, row.card) == (weights, capability, card)
        if here and row.pays and is_free[row.products]:
            setattr(kernels, f"{row.products}_backend", row.backend)
            times = f"{row.at_256:.2f} of the time of vLLM's choice at 256 rows, {row.at_2048:.2f} at 2,048"
            chosen.append(f"--{row.products}-backend {row.backend} ({times}: {row.source})")
    if chosen:
        logger.info(
            "measured on %s: %s; --moe-backend and --linear-backend set others.",
            card,
            ", ".join(chosen),
        )
