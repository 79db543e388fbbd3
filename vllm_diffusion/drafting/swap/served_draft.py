"""Draft of a running worker, whose weights are replaced and restored in the same memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vllm_diffusion.drafting.swap import FATES, RESTORE, UNHARMED
from vllm_diffusion.drafting.swap.new_draft import check_replaceable, read_new_draft

# Projections of the context's keys and values of all layers, which vLLM builds of the loaded
# layers.
_FUSED = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")
# Prefix of the target's embedding, which is not part of a draft.
_EMBEDDING = "embed_tokens."


@dataclass
class DraftInitInfo(WeightTransferInitInfo):
    """Settings of the transfer: none."""


@dataclass
class DraftUpdateInfo(WeightTransferUpdateInfo):
    """A new draft, or what becomes of the one that it replaced.

    Attributes:
        path: Absolute path of the draft's folder, as the server sees it.
        replaced: In place of a path, what becomes of the draft that the last update replaced, and
            the worker keeps: one of ``FATES``.
    """

    path: str = ""
    replaced: str = ""

    def __post_init__(self) -> None:
        """Refuse a path that is not absolute, unknown fates, and one next to a path.

        Raises:
            ValueError: Naming the field.
        """
        if not self.replaced and not Path(str(self.path)).is_absolute():
            raise ValueError(
                f"update_info.path={self.path!r} must be the absolute path of a draft's folder; {UNHARMED}."
            )
        if self.replaced and (self.replaced not in FATES or self.path):
            raise ValueError(
                f"update_info.replaced={self.replaced!r} must be {' or '.join(map(repr, FATES))}, and path "
                f"left out; {UNHARMED}."
            )


class DraftWeightTransferEngine(WeightTransferEngine[DraftInitInfo, DraftUpdateInfo]):
    """Loads another draft of an autoregressive model from a folder.

    An update is planned, and then carried out: a new draft is read and checked before the engine is
    paused, and its loading is a copy from host memory. The replaced weights stay in host memory
    until they are put back or dropped. Captured graphs stay valid, since every tensor keeps its
    address.
    """

    init_info_cls = DraftInitInfo
    update_info_cls = DraftUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """Take the arguments with which vLLM makes its own transfers."""
        super().__init__(config, vllm_config, device, model)
        # Tensors of a draft to load, or what becomes of the replaced one.
        self._planned: dict[str, Tensor] | str | None = None
        self._replaced: dict[str, Tensor] | None = None

    def init_transfer_engine(self, init_info: DraftInitInfo) -> None:
        """Forget what an update before has planned and not carried out."""
        self._planned = None

    def start_weight_update(self) -> None:
        """Begin an update; what was planned is discarded.

        Raises:
            ValueError: If the served draft cannot be replaced, or the update is of the target.
        """
        # vLLM's start_draft_weight_update names the draft for as long as its update lasts.
        if self.model is self._default_model:
            raise ValueError(
                'weight_transfer_config: backend "safetensors" brings drafts alone (start_draft_weight_update); '
                "have vLLM's reload_weights read the folder of another target."
            )
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

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Plan as :meth:`receive_weights` does, which leaves nothing on a device to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: DraftUpdateInfo) -> None:
        """Read a draft and plan to load it, or plan what becomes of the one that was replaced.

        Raises:
            ValueError: Naming what does not fit, or if no draft was replaced; nothing is planned.
        """
        if not update_info.replaced:
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

    def shutdown(self) -> None:
        """Do nothing, since no resource is held."""

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
