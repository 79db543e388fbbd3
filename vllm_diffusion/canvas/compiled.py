"""Functions of a pass that ``torch.compile`` makes one launch of."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def compiled(
    function: Callable[Arguments, Result], backend: str | None
) -> Callable[Arguments, Result]:
    """Compile ``function`` for the shapes of its first call, or return it as it is without a backend.

    Args:
        function: Function of tensors that have the same shapes in every call.
        backend: Backend of ``torch.compile``.
    """
    if backend is None:
        return function
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
