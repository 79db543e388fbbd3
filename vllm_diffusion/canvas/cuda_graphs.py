"""A function as a CUDA graph for each captured shape, and as one compiled function.

Which functions are captured: ``sampling/pass_graphs.py`` and ``families/diffusion_gemma/state.py``;
for how many canvases: ``runner/model_state.py``; which sizes of the backbone vLLM captures:
``startup/capture_sizes.py``.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_leaves

logger = logging.getLogger("vllm.vllm_diffusion")

# Why a compiler cannot write its cache.
_UNWRITABLE = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)))

# What the driver keeps of a graph besides its tensors; vLLM counts at least as much of its own.
BYTES_OF_A_GRAPH = 2**20

# (function, its inputs) -> what replays the call on those inputs and returns the same tensors.
Capture = Callable[[Callable[..., Any], tuple[Tensor, ...]], Callable[[], Any]]


class GraphedFunction:
    """A function of tensors, replayed as a graph for the shapes that were captured.

    An input that is where it was captured is not copied there. What it returns after a replay is
    overwritten by the next one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap a function whose launches depend on its inputs' shapes alone."""
        self._function = function
        self._graphs: dict[
            tuple[torch.Size, ...], tuple[Callable[[], Any], tuple[Tensor, ...]]
        ] = {}

    def __call__(self, *inputs: Tensor, **others: Any) -> Any:
        """Replay the graph of the inputs' shapes, or call the function if there is none.

        Args:
            inputs: Their shapes choose the graph.
            others: Other arguments; a graph has those that it was captured with.
        """
        graph = self._graphs.get(tuple(x.shape for x in inputs)) if self._graphs else None
        if graph is None:
            return self._function(*inputs, **others)
        replay, held = graph
        for mine, given in zip(held, inputs, strict=True):
            if mine.data_ptr() != given.data_ptr():
                mine.copy_(given)
        return replay()

    def is_captured(self, *inputs: Tensor) -> bool:
        """Report whether a call with inputs of these shapes replays a graph."""
        return tuple(x.shape for x in inputs) in self._graphs

    def capture(self, capture: Capture, *inputs: Tensor, **others: Any) -> None:
        """Capture the call for the shapes of ``inputs``, whose values do not matter.

        Args:
            capture: :func:`cuda_capture`, or what stands in for it.
            inputs: Kept: each replay reads its inputs from them.
            others: Other arguments, the same in every replay.
        """
        function = update_wrapper(partial(self._function, **others), self._function)
        key = tuple(x.shape for x in inputs)
        self._graphs[key] = (capture(function, inputs), inputs)

    def drop(self) -> None:
        """Give up what was captured."""
        self._graphs.clear()


def cuda_capture() -> Capture:
    """Capture calls as CUDA graphs on the current stream, which no other graph was captured on.

    Empty the allocator's cache before and after. The graphs share a memory pool of their own, so
    that none writes over what the backbone's return; they run one after another, and what one
    returns is used before the next.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        # Compiles, tunes and allocates what must not be captured.
        function(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Without torch.cuda.graph(), which empties the allocator's cache first: what one call
        # allocated the next one takes, and the caller empties it once.
        graph.capture_begin(pool=pool)
        try:
            output = function(*inputs)
        finally:
            graph.capture_end()

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    return capture


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
