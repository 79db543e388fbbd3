"""Draft of a running worker, whose weights are replaced and restored in the same memory.

The transfer ``safetensors`` does it for a draft as it updates the weights of a diffusion model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_diffusion.drafting.swap.new_draft import check_replaceable, read_new_draft
from vllm_diffusion.weights.transfer import RESTORE
from vllm_diffusion.weights.worker_engine import (
    SafetensorsInitInfo,
    SafetensorsUpdateInfo,
    SafetensorsWeightTransferEngine,
)

# Projections of the context's keys and values of all layers, which vLLM builds of the loaded layers.
_FUSED = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")
# Prefix of the target's embedding, which is no part of a draft.
_EMBEDDING = "embed_tokens."


class DraftWeightTransferEngine(SafetensorsWeightTransferEngine):
    """Loads weights of a diffusion model, or another draft of an autoregressive one.

    An update of a draft is planned, and then carried out: a new draft is read and checked before the
    engine is paused, and its loading is a copy from host memory. The replaced weights stay in host
    memory until they are put back or dropped. Captured graphs stay valid, since every tensor keeps its
    address.
    """

    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """Take the arguments with which vLLM makes its own transfers."""
        super().__init__(config, vllm_config, device, model)
        # Tensors of a draft to load, or what becomes of the replaced one.
        self._planned: dict[str, Tensor] | str | None = None
        self._replaced: dict[str, Tensor] | None = None

    @property
    def _is_of_draft(self) -> bool:
        # vLLM's start_draft_weight_update names the draft for as long as its update lasts.
        return self.model is not self._default_model

    def init_transfer_engine(self, init_info: SafetensorsInitInfo) -> None:
        self._planned = None
        super().init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """Begin an update; what was planned is discarded.

        Raises:
            ValueError: If the served draft cannot be replaced, or the model not be updated.
        """
        if not self._is_of_draft:
            super().start_weight_update()
            return
        check_replaceable(self.vllm_config)
        draft: Any = self.model
        for name, is_own in (
            ("a mask embedding", draft.model.has_separate_mask_embedding),
            ("an embedding", getattr(draft, "has_own_embed_tokens", False)),
            ("an output head", getattr(draft, "has_own_lm_head", False)),
        ):
            if is_own:
                raise ValueError(
                    f"The served draft has {name} of its own, and is not replaced while the server "
                    "runs; restart the server with the new one."
                )
        self._planned = None

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        """Read a draft and plan to load it, or plan what becomes of the one that was replaced.

        Raises:
            ValueError: Naming what does not fit, or if no draft was replaced; nothing is planned.
        """
        if not self._is_of_draft:
            super().receive_weights(update_info)
        elif not update_info.replaced:
            self._planned = read_new_draft(Path(update_info.path), self.vllm_config)
        elif self._replaced is None:
            raise ValueError(
                "update_info.replaced: no draft was replaced, so none can be put back."
            )
        else:
            self._planned = update_info.replaced

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Carry out the plan, if there is one; a load that fails leaves the old weights."""
        if not self._is_of_draft:
            super().finish_weight_update()
            return
        planned, self._planned = self._planned, None
        if isinstance(planned, dict):
            self._replaced = {
                name: tensor.to("cpu", copy=True) for name, tensor in self._weights().items()
            }
            try:
                draft: Any = self.model
                draft.model.load_weights(planned.items())
                self._rebuild()
            except BaseException:
                self._copy(self._replaced)
                raise
        elif planned is not None:
            if planned == RESTORE and self._replaced is not None:
                self._copy(self._replaced)
            self._replaced = None

    def _weights(self) -> dict[str, Tensor]:
        draft: Any = self.model
        return {
            name: parameter.data
            for name, parameter in draft.model.named_parameters()
            if not name.startswith(_EMBEDDING)
        }

    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights().items():
            weight.copy_(values[name])
        self._rebuild()

    def _rebuild(self) -> None:
        """Let vLLM derive its buffers anew, and copy their values to the old addresses."""
        draft: Any = self.model
        before = {name: getattr(draft.model, name) for name in _FUSED}
        draft.model._build_fused_kv_buffers()
        for name, buffer in before.items():
            if buffer is not None:
                buffer.copy_(getattr(draft.model, name))
                setattr(draft.model, name, buffer)
