"""Tensor rules of a family whose body is a class of ``transformers``, under the same or other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_diffusion.weights.tensor_rules import Shape, TensorRules


class BodyTensors(TensorRules):
    """Tensor rules of a class of ``transformers``."""

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
