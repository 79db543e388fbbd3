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


class ServedDraft:
    """DFlash draft of a worker.

    An update is planned, and then carried out: a new draft is read and checked before the engine is
    paused, and its loading is a copy from host memory. The replaced weights stay in host memory
    until they are put back or dropped. Captured graphs stay valid, since every tensor keeps its
    address.
    """

    def __init__(self, draft: Any, vllm_config: Any) -> None:
        """Wrap a worker's draft.

        Args:
            draft: vLLM's ``DFlashQwen3ForCausalLM`` or ours.
            vllm_config: Configuration of the worker.

        Raises:
            ValueError: If it cannot be replaced.
        """
        check_replaceable(vllm_config)
        self._model = draft.model
        for name, is_own in (
            ("a mask embedding", self._model.has_separate_mask_embedding),
            ("an embedding", getattr(draft, "has_own_embed_tokens", False)),
            ("an output head", getattr(draft, "has_own_lm_head", False)),
        ):
            if is_own:
                raise ValueError(
                    f"The served draft has {name} of its own, and is not replaced while the server "
                    "runs; restart the server with the new one."
                )
        self._vllm_config = vllm_config
        self._planned: dict[str, Tensor] | str | None = None
        self._replaced: dict[str, Tensor] | None = None

    def forget_plan(self) -> None:
        """Discard the plan."""
        self._planned = None

    def plan_load(self, folder: Path) -> None:
        """Read a draft and plan to load it.

        Raises:
            ValueError: Naming what does not fit; nothing is planned.
        """
        self._planned = read_new_draft(folder, self._vllm_config)

    def plan_replaced(self, what: str) -> None:
        """Plan to put back the weights that the last load replaced, or to drop them.

        Args:
            what: :data:`RESTORE` or :data:`DROP`.

        Raises:
            ValueError: If no weights were replaced.
        """
        if self._replaced is None:
            raise ValueError(
                "update_info.replaced: no draft was replaced, so none can be put back."
            )
        self._planned = what

    @torch.no_grad()
    def carry_out(self) -> None:
        """Carry out the plan, if there is one; a load that fails leaves the old weights."""
        planned, self._planned = self._planned, None
        if isinstance(planned, dict):
            self._replaced = {
                name: tensor.to("cpu", copy=True) for name, tensor in self._weights().items()
            }
            try:
                self._model.load_weights(planned.items())
                self._rebuild()
            except BaseException:
                self._copy(self._replaced)
                raise
        elif planned is not None:
            if planned == RESTORE and self._replaced is not None:
                self._copy(self._replaced)
            self._replaced = None

    def _weights(self) -> dict[str, Tensor]:
        return {
            name: parameter.data
            for name, parameter in self._model.named_parameters()
            if not name.startswith(_EMBEDDING)
        }

    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights().items():
            weight.copy_(values[name])
        self._rebuild()

    def _rebuild(self) -> None:
        """Let vLLM derive its buffers anew, and copy their values to the old addresses."""
        before = {name: getattr(self._model, name) for name in _FUSED}
        self._model._build_fused_kv_buffers()
        for name, buffer in before.items():
            if buffer is not None:
                buffer.copy_(getattr(self._model, name))
                setattr(self._model, name, buffer)


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
