"""Functions in place of Triton kernels that name only the launch arguments that they read.

vLLM passes all arguments of a launch in the kernel's own order: tensors, strides and sizes, up to
forty.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any, get_type_hints

# Functions that run in the place of one kernel, one after the other. One that returns a grid has
# done nothing: the kernel itself runs on it, interpreted.
Functions = tuple[Callable[..., tuple[int, ...] | None], ...]


class Launch(SimpleNamespace):
    """All arguments of a launch, under the names of the kernel's, without their ``_ptr``."""


def overrides(functions: Mapping[str, Functions]) -> dict[str, Callable[..., None]]:
    """Return what vLLM's dispatcher registers, from the functions that replace each kernel.

    A parameter of a function has the name of the kernel's argument, without its ``_ptr``; one of
    type :class:`Launch` has all of them.

    Args:
        functions: By the kernel's module and name.
    """
    return {name: _launch(name, each) for name, each in functions.items()}


def _launch(name: str, functions: Functions) -> Callable[..., None]:
    module, _, attribute = name.rpartition(".")
    kernel = getattr(import_module(module), attribute)
    names = [each.removesuffix("_ptr") for each in kernel.arg_names]
    read = [(function, get_type_hints(function)) for function in functions]

    def launch(*arguments: Any, **constants: Any) -> None:
        given = dict(zip(names, arguments, strict=False))
        given |= {each.removesuffix("_ptr"): value for each, value in constants.items()}
        for function, parameters in read:
            # An argument that the launch leaves out keeps its default.
            chosen = {each: given[each] for each in parameters if each in given}
            chosen |= {each: Launch(**given) for each in parameters if parameters[each] is Launch}
            grid = function(**chosen)
            if grid is not None:
                kernel[grid](*arguments, **constants)

    # A launch that names all arguments names options of the compiler too, which vLLM's dispatcher
    # takes only for a function that has the kernel's parameters.
    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in kernel.arg_names]
    launch.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return launch
