"""Rules for names and shapes of an unquantised checkpoint, which a family defines.

A model may use a tensor in two places, and a checkpoint may store it under either name; here it has
one of them, the canonical name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)(?:\..*)?$")

Shape = tuple[int, ...]


class TensorRules:
    """Base of a family's rules for the tensors of its checkpoints.

    Attributes:
        unquantised: Ends of names of matrices that stay as they are in every format: embeddings, and
            routers that vLLM gives no quantised form.
        has_fused_experts: True if the trained model has a layer's experts as two parameters, and
            not as a module for each expert.
    """

    unquantised: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "router.proj.weight")
    has_fused_experts: ClassVar[bool] = False

    def shapes(self, config: Any) -> dict[str, Shape]:
        """Return the shape of every tensor by canonical name; experts are fused, as in BF16.

        Args:
            config: transformers' configuration of the checkpoint.
        """
        raise NotImplementedError

    def canonical_name(self, name: str) -> str:
        """Return the canonical name of a tensor or module."""
        return name

    def all_names(self, name: str) -> tuple[str, ...]:
        """Return all names of a module with this canonical name."""
        return (name,)

    def linear_modules(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        """Return [out_features, in_features] of the modules that vLLM can quantise, by canonical name.

        Args:
            shapes: Shapes with split experts.
        """
        return {
            name.removesuffix(".weight"): shape
            for name, shape in shapes.items()
            if name.endswith(".weight") and len(shape) == 2 and not name.endswith(self.unquantised)
        }

    def copy_of(self, name: str) -> str:
        """Return the name of a tensor that replaces this one in checkpoints that have only it."""
        return name

    def module_names(self, shapes: dict[str, Shape]) -> set[str]:
        """Return all names that an entry of an ignore list may match: modules and their parents."""
        names = {"lm_head"}
        for tensor in shapes:
            for name in self.all_names(tensor):
                parts = name.split(".")
                names.update(".".join(parts[:end]) for end in range(1, len(parts)))
        return names


def split_experts(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Replace fused experts by a matrix for each expert."""
    split: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if name.endswith(".experts.gate_up_proj"):
            num_experts, twice, hidden = shape
            half: Shape = (twice // 2, hidden)
            parts = {"gate_proj": half, "up_proj": half}
        elif name.endswith(".experts.down_proj"):
            num_experts, parts = shape[0], {"down_proj": shape[1:]}
        else:
            split[name] = shape
            continue
        stem = name.rpartition(".")[0]
        for idx in range(num_experts):
            for part, size in parts.items():
                split[f"{stem}.{idx}.{part}.weight"] = size
    return split


def has_split_experts(names: Iterable[str]) -> bool:
    """Return true if any of these names belongs to a single expert."""
    return any(_EXPERT.match(name) for name in names)
