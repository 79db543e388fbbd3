"""Functions in place of Triton kernels that name only the launch arguments that they read.

vLLM passes all arguments of a launch in the kernel's own order: tensors, strides and sizes, up to forty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_type_hints


def overrides(
    functions: Mapping[str, tuple[Callable[..., None], ...]],
) -> dict[str, Callable[..., None]]:
    """Return what vLLM's dispatcher registers, from the functions that replace each kernel.

    The functions of a kernel run one after the other at each launch. A parameter has the name of the kernel's
    argument, without its ``_ptr``; one whose type is a dataclass takes the arguments that the fields name.

    Args:
        functions: By the kernel's module and name.
    """
    return {name: _launch(name, each) for name, each in functions.items()}


def _launch(kernel: str, functions: tuple[Callable[..., None], ...]) -> Callable[..., None]:
    module, _, attribute = kernel.rpartition(".")
    arg_names = getattr(import_module(module), attribute).arg_names
    names = [name.removesuffix("_ptr") for name in arg_names]
    read = [
        (
            function,
            {name: kind for name, kind in get_type_hints(function).items() if name != "return"},
        )
        for function in functions
    ]

    def launch(*arguments: Any, **constants: Any) -> None:
        given = dict(zip(names, arguments, strict=False))
        given |= {name.removesuffix("_ptr"): value for name, value in constants.items()}
        for function, parameters in read:
            function(**{name: _value(name, kind, given) for name, kind in parameters.items()})

    return launch


def _value(name: str, kind: Any, given: Mapping[str, Any]) -> Any:
    if not is_dataclass(kind):
        return given[name]
    return kind(**{field.name: given[field.name] for field in fields(kind)})
