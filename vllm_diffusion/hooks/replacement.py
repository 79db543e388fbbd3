"""How a function of ours takes the place of one of vLLM's: this is the only way in this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_stands_in_for_vllm"


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Put a function in the place of ``owner.name``. Safe to call twice: ours is never replaced.

    Every symbol that is replaced has a row in :mod:`vllm_diffusion.hooks.upstream`, whose check of
    signatures still sees what was there.

    Args:
        owner: A class or module of vLLM.
        name: Of its function.
        make: Given vLLM's function, returns the one that takes its place. It must leave models that
            are not ours to vLLM's.
    """
    stock = getattr(owner, name)
    if hasattr(stock, _MARK):
        return
    ours = make(stock)
    functools.update_wrapper(ours, stock, assigned=(), updated=())
    setattr(ours, _MARK, True)
    setattr(owner, name, ours)
