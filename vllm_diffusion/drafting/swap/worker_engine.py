"""The worker's side of the weight transfer ``safetensors``, where a draft may be replaced too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_diffusion.drafting.swap.served_draft import ServedDraft
from vllm_diffusion.weights.worker_engine import (
    SafetensorsInitInfo,
    SafetensorsUpdateInfo,
    SafetensorsWeightTransferEngine,
)


class DraftWeightTransferEngine(SafetensorsWeightTransferEngine):
    """Loads weights of a diffusion model, or another draft of an autoregressive one."""

    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """Take the arguments with which vLLM makes its own transfers."""
        super().__init__(config, vllm_config, device, model)
        self._draft: ServedDraft | None = None

    @property
    def _is_of_draft(self) -> bool:
        # vLLM's start_draft_weight_update names the draft for as long as its update lasts.
        return self.model is not self._default_model

    def init_transfer_engine(self, init_info: SafetensorsInitInfo) -> None:
        if self._draft is not None:
            self._draft.forget_plan()
        super().init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        if not self._is_of_draft:
            super().start_weight_update()
            return
        if self._draft is None:
            self._draft = ServedDraft(self.model, self.vllm_config)
        self._draft.forget_plan()

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        if not self._is_of_draft:
            super().receive_weights(update_info)
            return
        assert self._draft is not None
        if update_info.replaced:
            self._draft.plan_replaced(update_info.replaced)
        else:
            self._draft.plan_load(Path(update_info.path))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        if not self._is_of_draft:
            super().finish_weight_update()
            return
        assert self._draft is not None
        self._draft.carry_out()
