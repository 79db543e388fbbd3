"""Registers drafts for autoregressive models; the package's plugin calls it in every process."""

from __future__ import annotations

from vllm_diffusion.weights.transfer import WEIGHT_TRANSFER


def register() -> None:
    """Register our draft model, its start-up checks, and the transfer that replaces a draft.

    Safe to call twice.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models import ModelRegistry

    from vllm_diffusion.drafting import check, quantized

    model = "vllm_diffusion.drafting.model:DFlashMaskedDraftModel"
    ModelRegistry.register_model(check.ARCHITECTURE, model)
    check.install()
    quantized.install()
    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        worker = "vllm_diffusion.drafting.swap.served_draft", "DraftWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, *worker)
