"""Update of a served model's weights: tensors that were sent and checked, and are not yet loaded.

A trainer may send a model in one file or a tensor at a time. The model does not change before all
of the update was found to fit; a misfit is refused by the tensor's name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_diffusion.weights.formats import FLOATS, Format, Spec, read_format
from vllm_diffusion.weights.regular_files import file_stamp
from vllm_diffusion.weights.tensor_rules import Shape, TensorRules, split_experts
from vllm_diffusion.weights.weight_files import (
    StoredTensor,
    file_problem,
    largest_magnitude,
    listed,
    read_tensor,
    stored_tensors,
    weight_files,
)

UNHARMED = "nothing was loaded, and the server serves what it served"
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def expected_specs(
    shapes: dict[str, Shape], quantized: Format | None, rules: TensorRules
) -> dict[str, Spec]:
    """Return the allowed dtypes and shapes of every tensor of the checkpoint, by canonical name."""
    specs: dict[str, Spec] = {name: (FLOATS, (shape,)) for name, shape in shapes.items()}
    if quantized is None:
        return specs
    for name, shape in rules.linear_modules(shapes).items():
        if quantized.quantizes(rules.all_names(name)):
            del specs[f"{name}.weight"]
            specs |= {f"{name}.{end}": spec for end, spec in quantized.tensors(shape).items()}
    return specs


def check_new_weights(config: Any, rules: TensorRules, quantization: dict[str, Any] | None) -> None:
    """Refuse a checkpoint whose weights vLLM cannot load a second time.

    Its loader of experts' activation scales reads the present scale, and there is none while a
    layer is loaded again.

    Args:
        config: transformers' configuration of the checkpoint.
        rules: Names and shapes of its tensors.
        quantization: Its quantization config, or ``None``.

    Raises:
        ValueError: Naming the option and the remedy.
    """
    if quantization is None or quantization.get("quant_method") != "compressed-tensors":
        return
    specs = expected_specs(split_experts(rules.shapes(config)), read_format(quantization), rules)
    if any(".experts." in name and name.endswith(".input_scale") for name in specs):
        raise ValueError(
            "--weight-transfer-config: vLLM cannot load the activation scales of experts into a running "
            "server (compressed-tensors FP8 with static activations); serve a checkpoint with dynamic "
            "activation scales, or leave it out."
        )


def why_misfit(tensor: StoredTensor, spec: Spec, expected: str) -> str | None:
    """Return that a tensor has another dtype or shape than it must have; ``None`` if it has not.

    Args:
        tensor: The tensor.
        spec: Allowed dtypes and shapes.
        expected: Words between what it is and what it must be.
    """
    dtypes, shapes = spec
    if tensor.dtype in dtypes and tensor.shape in shapes:
        return None
    return (
        f"{tensor.name} in {tensor.file} is {tensor.dtype} {list(tensor.shape)}, but {expected} "
        f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
    )


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
    files = weight_files(path) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"update_info.path: {path} holds no safetensors file; {UNHARMED}.")
    for file in files:
        if problem := file_problem(file):
            raise ValueError(
                f"update_info.path: {file} {problem}; send a file that the server can read. "
                f"{UNHARMED.capitalize()}."
            )
    return files
