"""Registers drafts for autoregressive models; the package's plugin calls it in every process."""

from __future__ import annotations

from vllm_diffusion.weights.transfer import WEIGHT_TRANSFER

_MODEL = "vllm_diffusion.drafting.model:DFlashMaskedDraftModel"
_WEIGHT_TRANSFER_WORKER = (
    "vllm_diffusion.drafting.swap.served_draft",
    "DraftWeightTransferEngine",
)


def register() -> None:
    """Register our draft model, its start-up checks, and the transfer that replaces a draft.

    Safe to call twice.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models import ModelRegistry

    from vllm_diffusion.drafting import check

    ModelRegistry.register_model(check.ARCHITECTURE, _MODEL)
    check.install()
    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, *_WEIGHT_TRANSFER_WORKER)
