"""Functions of a pass as ``torch.compile`` makes them, or as they are where it cannot."""

import errno
import logging
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_leaves

logger = logging.getLogger("vllm.vllm_diffusion")

# Why a compiler cannot write its cache.
_UNWRITABLE = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)))

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def compiled(
    function: Callable[Arguments, Result], backend: str | None
) -> Callable[Arguments, Result]:
    """Compile ``function`` for the shapes of its first call, or return it as it is without a
    backend.

    Args:
        function: Function of tensors that have the same shapes in every call.
        backend: Backend of ``torch.compile``.
    """
    if backend is None:
        return function
    return _or_eager(
        torch.compile(function, fullgraph=True, dynamic=False, backend=backend), function
    )


def _or_eager(
    run: Callable[Arguments, Result], function: Callable[Arguments, Result]
) -> Callable[Arguments, Result]:
    """Return a function that calls ``run``, and ``function`` once the compiler cannot write.

    A call compiles before it computes anything, so the same inputs can be given to the function
    itself.

    Args:
        run: The compiled function.
        function: The same one as it is.
    """
    chosen = run

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal chosen
        try:
            return chosen(*args, **kwargs)
        except BackendCompilerFailed as error:
            if not any(reason in str(error) for reason in _UNWRITABLE):
                raise
            chosen = function
            logger.warning(
                "%s runs uncompiled, and slower, until this server ends: torch.compile cannot write its files "
                "(%s). Give TORCHINDUCTOR_CACHE_DIR and TMPDIR a folder with room, and start again.",
                getattr(function, "__qualname__", function),
                error.inner_exception,
            )
            return function(*args, **kwargs)

    return call


def compiled_by_rows(function: Callable[..., Result], backend: str | None) -> Callable[..., Result]:
    """Compile ``function`` once for any number of rows, or return it as it is without a backend.

    Fit for functions that select, copy or multiply: a fusion that adds or divides may round
    differently on a GPU.

    Args:
        function: Called with tensors [num_rows, ...], or tuples of them, and by keyword with what
            keeps its shape.
        backend: Backend of ``torch.compile``.
    """
    if backend is None:
        return function
    run = _or_eager(torch.compile(function, fullgraph=True, backend=backend), function)

    def call(*by_row: Any, **others: Any) -> Result:
        # The compiler takes 0 and 1 for constants: such calls are too rare to compile for in the
        # middle of serving.
        if len(by_row[0]) < 2:
            return function(*by_row, **others)
        for tensor in tree_leaves(by_row):
            if tensor is not None:
                torch._dynamo.mark_dynamic(tensor, 0)
        return run(*by_row, **others)

    return call
