"""Worker's side of the weight transfer ``safetensors``, by files that trainer and server both see.

vLLM's own transfers move tensors between GPUs. This one needs no GPU; with files in memory
(``/dev/shm``) it costs a copy. Unlike vLLM's it is transactional: an update is checked while it is
sent, and loaded when it is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from vllm_diffusion.weights.tensor_rules import TensorRules
from vllm_diffusion.weights.transfer import FATES
from vllm_diffusion.weights.update import UNHARMED, ExpectedTensors, WeightUpdate

logger = init_logger(f"vllm.{__name__}")


@dataclass
class SafetensorsInitInfo(WeightTransferInitInfo):
    """Settings of the transfer: none."""


@dataclass
class SafetensorsUpdateInfo(WeightTransferUpdateInfo):
    """Part of an update, or all of it.

    Attributes:
        path: Of a safetensors file, or of a folder of them, as the server sees it. What it holds is
            named as in a checkpoint, and stays there until the update is finished. Of a draft it is
            the folder of a whole one.
        replaced: In place of a path, what becomes of the draft that the last update of the draft
            replaced, and the worker keeps: one of ``FATES``.
    """

    path: str = ""
    replaced: str = ""

    def __post_init__(self) -> None:
        """Refuse a path that is not absolute, and unknown actions.

        Raises:
            ValueError: Naming the field.
        """
        if self.replaced in FATES and self.path == "":
            return
        if self.replaced != "":
            raise ValueError(
                f"update_info.replaced={self.replaced!r} must be {' or '.join(map(repr, FATES))}, and path "
                f"left out; {UNHARMED}."
            )
        if not isinstance(self.path, str) or not Path(self.path).is_absolute():
            raise ValueError(
                f"update_info.path={self.path!r} must be the absolute path of a safetensors file, or "
                f"of a folder of them; {UNHARMED}."
            )


class SafetensorsWeightTransferEngine(
    WeightTransferEngine[SafetensorsInitInfo, SafetensorsUpdateInfo]
):
    """Worker engine that loads files of a trainer.

    Attributes:
        weights_are_lost: True after a worker discarded the weights: the next update must be whole.
    """

    init_info_cls = SafetensorsInitInfo
    update_info_cls = SafetensorsUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """Make the engine as vLLM makes its own."""
        super().__init__(config, vllm_config, device, model)
        self.weights_are_lost = False
        self._expected: ExpectedTensors | None = None
        self._update: WeightUpdate | None = None
        # Where layers rewrite what they load, they are loaded again as wholes.
        self._reloads_layers = vllm_config.quant_config is not None or device.type != "cpu"

    def init_transfer_engine(self, init_info: SafetensorsInitInfo) -> None:
        """A trainer that begins anew: what one before it sent, and did not finish, is forgotten."""
        if self._update is not None:
            self._update = self._new_update()

    def start_weight_update(self) -> None:
        """Begin an update; the tensors of a failed one are discarded.

        Raises:
            ValueError: If the model cannot be updated.
        """
        self._update = self._new_update()

    def _new_update(self) -> WeightUpdate:
        if self._expected is None:
            rules: TensorRules | None = getattr(self.model_config, "tensor_rules", None)
            if rules is None:
                raise ValueError(
                    'weight_transfer_config: backend "safetensors" updates the diffusion models of '
                    f"vllm-diffusion, and {type(self.model).__name__} is none of them; of other models "
                    "it updates a DFlash draft (start_draft_weight_update)."
                )
            self._expected = ExpectedTensors(
                self.model_config.hf_config,
                rules,
                self.model_config.model_arch_config.quantization_config,
            )
        return WeightUpdate(self._expected)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check a part of an update and keep its path.

        Args:
            update_info: Fields of :class:`SafetensorsUpdateInfo`.

        Raises:
            ValueError: Naming the field, the file or the tensor; the update is over, and nothing of
                it is loaded.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        """See :meth:`update_weights`."""
        if update_info.replaced:
            raise ValueError(
                "update_info.replaced is of updates of a draft (start_draft_weight_update); "
                f"{UNHARMED}."
            )
        assert self._update is not None
        self._update.add(Path(update_info.path))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Load the tensors that were sent, if there are any.

        Raises:
            ValueError: If a file has changed or a tensor is missing; the update goes on.
        """
        update = self._update
        assert update is not None
        if update.is_empty:
            self._update = None
            return
        update.check(is_whole=self._reloads_layers or self.weights_are_lost)
        if self._reloads_layers:
            initialize_layerwise_reload(self.model)
        self.model.load_weights(update.tensors())
        if self._reloads_layers:
            finalize_layerwise_reload(self.model, self.model_config)
        self._update = None
        self.weights_are_lost = False

    def shutdown(self) -> None:
        """Do nothing, since no resource is held."""
