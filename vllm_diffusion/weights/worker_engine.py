"""Worker's side of the weight transfer ``safetensors``, by files that trainer and server both see.

vLLM's own transfers move tensors between GPUs. This one needs no GPU; with files in memory
(``/dev/shm``) it costs a copy. A trainer may send a model in one file or a tensor at a time. Unlike
vLLM's transfers it is transactional: an update is checked while it is sent, and loaded when it is
finished. A misfit is refused by the tensor's name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
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
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from vllm_diffusion.weights.check import expected_specs, listed, why_misfit
from vllm_diffusion.weights.formats import Spec, read_format
from vllm_diffusion.weights.regular_files import file_stamp
from vllm_diffusion.weights.tensor_rules import TensorRules, split_experts
from vllm_diffusion.weights.transfer import FATES
from vllm_diffusion.weights.weight_files import (
    StoredTensor,
    file_problem,
    largest_magnitude,
    read_tensor,
    stored_tensors,
)

UNHARMED = "nothing was loaded, and the server serves what it served"
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class ExpectedTensors:
    """Expected tensors of a served model's checkpoint, by name.

    A model may use one tensor in several places, under several names. It may be sent under any of
    them.
    """

    def __init__(
        self, config: Any, rules: TensorRules, quantization: dict[str, Any] | None
    ) -> None:
        """Compute the dtypes and shapes of every tensor.

        Args:
            config: transformers' configuration of the checkpoint that is served.
            rules: Names and shapes of its tensors.
            quantization: Its quantization config, or ``None``.

        Raises:
            ValueError: If tensors of its quantisation are not known.
        """
        self._rules = rules
        shapes = rules.shapes(config)
        quantized = None if quantization is None else read_format(quantization)
        if quantization is not None and quantized is None:
            raise ValueError(
                "The tensors of the served model's quantization are not known here, so an update of "
                "them cannot be checked; serve a checkpoint in bfloat16, FP8 or NVFP4."
            )
        self._specs = expected_specs(split_experts(shapes), quantized, rules)
        # Experts may come one by one or, unquantised, fused as transformers has them.
        self._fused = {} if quantized else expected_specs(shapes, None, rules)
        self._tied_embedding: str | None = None
        if config.tie_word_embeddings:
            # A draft has no embedding: it uses its target's.
            self._tied_embedding = next((n for n in shapes if n.endswith(_EMBEDDING)), None)

    def tensor_of(self, name: str) -> str:
        """Return the one name by which the model's tensor with the name ``name`` is counted."""
        name = self._rules.canonical_name(name)
        if name == _HEAD and self._tied_embedding is not None:
            return self._tied_embedding
        return min(name, self._rules.copy_of(name))

    def check(self, tensor: StoredTensor) -> None:
        """Refuse a tensor that the model does not have, or has with another dtype or shape.

        Raises:
            ValueError: Naming the tensor, its file, and the expected dtype and shape.
        """
        spec = self._spec(tensor.name)
        if spec is None:
            raise ValueError(
                f"{tensor.name} in {tensor.file} is no tensor of the served model; send tensors under "
                f"the names of its checkpoint. {UNHARMED.capitalize()}."
            )
        if misfit := why_misfit(tensor, spec, "in the served model it is"):
            raise ValueError(f"{misfit}; {UNHARMED}.")

    def missing(self, sent: set[str]) -> list[str]:
        """Return the tensors of the model that were not sent.

        Args:
            sent: Result of :meth:`tensor_of` for each tensor that was sent.
        """
        fused = {name for name in self._fused if name in sent and name not in self._specs}
        parts = {part for name in fused for part in split_experts({name: self._fused[name][1][0]})}
        names = (name for name in self._specs if self.tensor_of(name) not in sent)
        return [name for name in names if name not in parts]

    def _spec(self, name: str) -> Spec | None:
        name = self._rules.canonical_name(name)
        if name == _HEAD and self._tied_embedding is not None:
            name = self._tied_embedding
        return self._specs.get(name) or self._fused.get(name)


class WeightUpdate:
    """Tensors that a trainer has sent between the start and the finish of an update."""

    def __init__(self, expected: ExpectedTensors) -> None:
        self._expected = expected
        # By :meth:`ExpectedTensors.tensor_of`.
        self._sent: dict[str, StoredTensor] = {}
        self._stamps: dict[Path, tuple[int, ...] | None] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing was sent."""
        return not self._sent

    @property
    def missing(self) -> list[str]:
        """Tensors of the model that were not sent."""
        return self._expected.missing(set(self._sent))

    def add(self, path: Path) -> None:
        """Add the tensors of a file, or of every file of a folder, to the update.

        All of them are added, or none: a refusal leaves the update as it was. Every value is
        checked.

        Args:
            path: Absolute path of a safetensors file, or of a folder with such files.

        Raises:
            ValueError: Naming the file or the tensor.
        """
        files = _files(path)
        stamps = {file: file_stamp(file) for file in files}
        sent = dict(self._sent)
        for tensor in stored_tensors(files):
            self._expected.check(tensor)
            key = self._expected.tensor_of(tensor.name)
            other = sent.get(key)
            if other is not None and other.name != tensor.name:
                if not torch.equal(read_tensor(other).float(), read_tensor(tensor).float()):
                    raise ValueError(
                        f"{tensor.name} in {tensor.file} and {other.name} in {other.file} are the same tensor "
                        "of the served model, but differ; send one of them, or both alike. "
                        f"{UNHARMED.capitalize()}."
                    )
                continue
            if not math.isfinite(largest_magnitude(tensor)):
                raise ValueError(
                    f"{tensor.name} in {tensor.file} holds numbers that are not finite; train or write it "
                    f"again. {UNHARMED.capitalize()}."
                )
            sent[key] = tensor
        self._sent = sent
        self._stamps |= stamps

    def check(self, *, is_whole: bool) -> None:
        """Check the whole update before it is loaded.

        Args:
            is_whole: True if it must have every tensor.

        Raises:
            ValueError: If a file changed since it was sent, or a tensor is missing.
        """
        for file, stamp in self._stamps.items():
            if file_stamp(file) != stamp:
                raise ValueError(
                    f"{file} was changed or taken away since it was sent; keep what is sent until "
                    "the update is finished: send it again, and finish. Until then "
                    f"{UNHARMED}."
                )
        missing = self.missing if is_whole else []
        if missing:
            raise ValueError(
                f"{listed(missing)} {'was' if len(missing) == 1 else 'were'} not sent, and this model "
                "takes whole updates only (it is quantised, on a GPU, or its weights were discarded "
                f"by a sleep of level 2): send the rest, and finish. Until then {UNHARMED}."
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and values of each tensor, read one at a time."""
        for tensor in self._sent.values():
            yield tensor.name, read_tensor(tensor)


def _files(path: Path) -> list[Path]:
    if not os.path.exists(path):
        raise ValueError(
            f"update_info.path: {path} is not there for the server to read; {UNHARMED}."
        )
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"update_info.path: {path} holds no safetensors file; {UNHARMED}.")
    for file in files:
        if problem := file_problem(file):
            raise ValueError(
                f"update_info.path: {file} {problem}; send a file that the server can read. "
                f"{UNHARMED.capitalize()}."
            )
    return files


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
