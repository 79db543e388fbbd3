"""Functions in place of Triton kernels that name only the launch arguments that they read.

vLLM passes all arguments of a launch in the kernel's own order: tensors, strides and sizes, up to forty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_type_hints

# Functions that run in the place of one kernel, one after the other.
Functions = tuple[Callable[..., None], ...]


def overrides(functions: Mapping[str, Functions]) -> dict[str, Callable[..., None]]:
    """Return what vLLM's dispatcher registers, from the functions that replace each kernel.

    A parameter of a function has the name of the kernel's argument, without its ``_ptr``. One whose type is a
    dataclass takes the arguments that the fields name.

    Args:
        functions: By the kernel's module and name.
    """
    return {name: _launch(name, each) for name, each in functions.items()}


def _launch(kernel: str, functions: Functions) -> Callable[..., None]:
    module, _, attribute = kernel.rpartition(".")
    arg_names = getattr(import_module(module), attribute).arg_names
    names = [name.removesuffix("_ptr") for name in arg_names]
    read = [(function, get_type_hints(function)) for function in functions]

    def launch(*arguments: Any, **constants: Any) -> None:
        given = dict(zip(names, arguments, strict=False))
        given |= {name.removesuffix("_ptr"): value for name, value in constants.items()}
        for function, parameters in read:
            function(**_chosen(parameters, given))

    return launch


def _chosen(parameters: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function; one that the launch leaves out keeps its default."""
    chosen = {name: given[name] for name in parameters if name in given}
    for name, kind in parameters.items():
        if isinstance(kind, type) and is_dataclass(kind):
            chosen[name] = kind(**{field.name: given[field.name] for field in fields(kind)})
    return chosen
