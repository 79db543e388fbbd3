"""Names and shapes of a checkpoint's tensors, which a family defines, and modules that a quantised
one ignores.

A model may use a tensor in two places, and a checkpoint may store it under either name; here it has
one of them, the canonical name.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

Shape = tuple[int, ...]


class CheckpointTensors:
    """Names and shapes of the tensors of a family's checkpoints.

    Attributes:
        unquantised: Ends of names of matrices that stay as they are in every format: embeddings,
            and routers that vLLM gives no quantised form.
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

    def all_names(self, name: str) -> tuple[str, ...]:
        """Return all names of a module with this canonical name."""
        return (name,)

    def linear_modules(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        """Return [out_features, in_features] of the modules that vLLM can quantise, by canonical
        name.

        Args:
            shapes: Shapes with split experts.
        """
        return {
            name.removesuffix(".weight"): shape
            for name, shape in shapes.items()
            if name.endswith(".weight") and len(shape) == 2 and not name.endswith(self.unquantised)
        }


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


class BodyTensors(CheckpointTensors):
    """Tensors of a class of ``transformers``."""

    def __init__(self, body: str, prefixes: Mapping[str, str] | None = None) -> None:
        """Name the class.

        Args:
            body: The class in ``transformers``; the checkpoint's configuration fits it.
            prefixes: Beginning of a name in ``transformers`` to that in the checkpoint.
        """
        self._body = body
        self._prefixes = prefixes or {}

    def shapes(self, config: Any) -> dict[str, Shape]:
        import transformers

        with torch.device("meta"):
            model = getattr(transformers, self._body)(config)
        shapes = {self._published(name): tuple(t.shape) for name, t in model.state_dict().items()}
        if config.tie_word_embeddings:
            shapes = {name: shape for name, shape in shapes.items() if "lm_head" not in name}
        return shapes

    def _published(self, name: str) -> str:
        for prefix, published in self._prefixes.items():
            if name.startswith(prefix):
                return published + name.removeprefix(prefix)
        return name


def spell_out_patterns(quant: Any, config: Any, tensors: CheckpointTensors, mapper: Any) -> None:
    """Add the modules that each pattern of an ignore list matches, under vLLM's names.

    vLLM renames the plain entries of the list, and matches patterns with its own module names: a
    pattern that begins with the checkpoint's ``model.encoder`` would match nothing, and its modules
    would be read as quantised.

    Args:
        quant: vLLM's config of compressed-tensors; its ``ignore`` is extended. Others are
            left alone.
        config: transformers' configuration of the checkpoint.
        tensors: Names of its tensors.
        mapper: The model's ``WeightsMapper``.
    """
    if quant is None or quant.get_name() != "compressed-tensors":
        return
    patterns = [entry[3:] for entry in quant.ignore if entry.startswith("re:")]
    if not patterns:
        return
    names = tensors.linear_modules(split_experts(tensors.shapes(config)))
    quant.ignore += [
        mapper.map_name(name)
        for name in names
        if any(re.match(pattern, one) for pattern in patterns for one in tensors.all_names(name))
    ]
