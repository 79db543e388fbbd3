"""Registers drafts for autoregressive models; the package's plugin calls it in every process."""

from vllm_diffusion.drafting.draft_fields import NEMO_ARCHITECTURES
from vllm_diffusion.startup.options import DRAFT_TRANSFER


def register() -> None:
    """Register our draft model, its start-up checks, and the transfer that replaces a draft.

    Safe to call twice.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models import ModelRegistry

    from vllm_diffusion.drafting import draft_check, quantized

    model = "vllm_diffusion.drafting.model:DFlashMaskedDraftModel"
    ModelRegistry.register_model(draft_check.ARCHITECTURE, model)
    # A configuration has NeMo's names until it is checked.
    for name, (_, served_by) in NEMO_ARCHITECTURES.items():
        for each in (name, f"DFlash{name}"):
            ModelRegistry.register_model(each, f"vllm.model_executor.models.{served_by}")
    draft_check.install()
    quantized.install()
    if DRAFT_TRANSFER not in WeightTransferEngineFactory._registry:
        worker = "vllm_diffusion.drafting.swap.served_draft", "DraftWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(DRAFT_TRANSFER, *worker)
