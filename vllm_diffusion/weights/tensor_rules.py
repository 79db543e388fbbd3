"""Names and shapes of an unquantised checkpoint: what a family says, and what follows from it.

A model may use a tensor in two places and a checkpoint store it under either name; one of them, the
canonical name, stands for it here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)(?:\..*)?$")

Shape = tuple[int, ...]


class TensorRules:
    """A family says what its checkpoints hold.

    Attributes:
        unquantised: Ends of names of matrices that stay as they are in every format: embeddings, and
            routers that vLLM gives no quantised form.
        has_fused_experts: Whether the model that is trained has a layer's experts as two parameters,
            and not as modules of each.
    """

    unquantised: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "router.proj.weight")
    has_fused_experts: ClassVar[bool] = False

    def shapes(self, config: Any) -> dict[str, Shape]:
        """Canonical name to shape of every tensor; experts are fused, as in a BF16 checkpoint.

        Args:
            config: transformers' configuration of the checkpoint.
        """
        raise NotImplementedError

    def canonical_name(self, name: str) -> str:
        """The name under which a tensor or module is known here."""
        return name

    def all_names(self, name: str) -> tuple[str, ...]:
        """Every name of a module with this canonical name."""
        return (name,)

    def linear_modules(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        """Canonical name to [out_features, in_features] of the modules that vLLM can quantise.

        Args:
            shapes: With split experts.
        """
        return {
            name.removesuffix(".weight"): shape
            for name, shape in shapes.items()
            if name.endswith(".weight") and len(shape) == 2 and not name.endswith(self.unquantised)
        }

    def copy_of(self, name: str) -> str:
        """The name of a tensor that may stand in for this one where a checkpoint has only it."""
        return name

    def module_names(self, shapes: dict[str, Shape]) -> set[str]:
        """Every name that an entry of an ignore list may mean: modules and their parents."""
        names = {"lm_head"}
        for tensor in shapes:
            for name in self.all_names(tensor):
                parts = name.split(".")
                names.update(".".join(parts[:end]) for end in range(1, len(parts)))
        return names


def split_experts(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """The same with a matrix for each expert in place of the fused ones."""
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
    """Whether any of these names belongs to a single expert."""
    return any(_EXPERT.match(name) for name in names)
