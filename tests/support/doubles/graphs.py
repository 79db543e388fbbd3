"""A stand-in for capturing CUDA graphs: as strict about addresses, on any machine."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def emulated_capture(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """Make a replay run the call on the captured inputs and overwrite the captured outputs."""
    output = function(*inputs)

    def replay() -> Any:
        for held, new in zip(tree_leaves(output), tree_leaves(function(*inputs)), strict=True):
            if held is not None:
                held.copy_(new)
        return output

    return replay
