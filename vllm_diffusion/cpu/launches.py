"""Functions in place of Triton kernels, which find the arguments of a launch by their names.

vLLM passes all arguments of a launch in the kernel's own order: tensors, strides and sizes, up to
forty.
"""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any


class Launch(SimpleNamespace):
    """All arguments of a launch, under the names of the kernel's, without their ``_ptr``."""


# Functions that run in the place of one kernel, one after the other. One that returns a grid has
# done nothing: the kernel itself runs on it, interpreted.
Functions = tuple[Callable[[Launch], tuple[int, ...] | None], ...]


def overrides(functions: Mapping[str, Functions]) -> dict[str, Callable[..., None]]:
    """Return what vLLM's dispatcher registers, from the functions that replace each kernel.

    Args:
        functions: By the kernel's module and name.
    """
    return {name: _launch(name, each) for name, each in functions.items()}


def _launch(name: str, functions: Functions) -> Callable[..., None]:
    kernel = resolve_name(name)
    names = [each.removesuffix("_ptr") for each in kernel.arg_names]

    def launch(*arguments: Any, **constants: Any) -> None:
        given = dict(zip(names, arguments, strict=False))
        given |= {each.removesuffix("_ptr"): value for each, value in constants.items()}
        for function in functions:
            grid = function(Launch(**given))
            if grid is not None:
                kernel[grid](*arguments, **constants)

    # A launch that names all arguments names options of the compiler too, which vLLM's dispatcher
    # takes only for a function that has the kernel's parameters.
    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in kernel.arg_names]
    launch.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return launch
