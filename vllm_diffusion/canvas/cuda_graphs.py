"""CUDA graphs of a pass: which sizes vLLM captures of the model, and our own around it.

A step that replays graphs launches a handful of them: one embeds the canvases with their
self-conditioning, vLLM's holds the backbone, one samples and decides. A batch that uses more settings
than the plain step has, or holds a narrower canvas, runs the same functions without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Beyond this many canvases a launch costs nothing beside the work it starts.
MAX_CANVASES = 64
# Up to here every count has a graph of the backbone; above, every fourth, and the runner pads.
MAX_EXACT = 8
# What the driver keeps of a graph besides its tensors; vLLM counts at least as much of its own.
BYTES_OF_A_GRAPH = 2**20

# (function, its inputs) -> what replays the call on those inputs and returns the same tensors.
Capture = Callable[[Callable[..., Any], tuple[Tensor, ...]], Callable[[], Any]]


def canvas_counts(most: int) -> list[int]:
    """Numbers of canvases that get a graph of the backbone, ascending, up to ``most``."""
    most = min(most, MAX_CANVASES)
    counts = {*range(1, min(most, MAX_EXACT) + 1), *range(MAX_EXACT, most + 1, 4), most}
    return sorted(counts)


def capture_sizes(canvas_length: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Rows of the passes that vLLM is to capture.

    Whole canvases of 1 to ``max_num_seqs`` requests, and up to twice as many where finished canvases
    are encoded in the same pass. Short prompts take the smallest of them.

    Args:
        canvas_length: Rows of a canvas.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Rows of the largest pass.
    """
    counts = canvas_counts(2 * max_num_seqs)
    return [n * canvas_length for n in counts if n * canvas_length <= max_num_batched_tokens]


def choose_capture_sizes(vllm_config: VllmConfig) -> None:
    """Have vLLM capture whole canvases, where the operator sets no sizes.

    By itself it stops at 512 rows (1,024 on SM100), which is two canvases of 256.
    """
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    if (
        current_platform.is_cpu()
        or compilation.cudagraph_capture_sizes is not None
        or compilation.max_cudagraph_capture_size is not None
    ):
        return
    scheduler = vllm_config.scheduler_config
    compilation.cudagraph_capture_sizes = capture_sizes(
        vllm_config.diffusion_config.canvas_length,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
    )


class GraphedFunction:
    """A function of tensors, replayed as a graph for the shapes that were captured.

    An input that is where it was captured is not copied there. What it returns after a replay is overwritten by the next one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap a function whose launches depend on its inputs' shapes alone."""
        self._function = function
        self._graphs: dict[
            tuple[torch.Size, ...], tuple[Callable[[], Any], tuple[Tensor, ...]]
        ] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        graph = self._graphs.get(tuple(x.shape for x in inputs)) if self._graphs else None
        if graph is None:
            return self._function(*inputs)
        replay, held = graph
        for mine, given in zip(held, inputs, strict=True):
            if mine.data_ptr() != given.data_ptr():
                mine.copy_(given)
        return replay()

    def is_captured(self, *inputs: Tensor) -> bool:
        """Report whether a call with inputs of these shapes replays a graph."""
        return tuple(x.shape for x in inputs) in self._graphs

    def capture(self, capture: Capture, *inputs: Tensor) -> None:
        """Capture the call for the shapes of ``inputs``, whose values do not matter.

        Args:
            capture: :func:`cuda_capture`, or what stands in for it.
            inputs: Kept: each replay reads its inputs from them.
        """
        key = tuple(x.shape for x in inputs)
        self._graphs[key] = (capture(self._function, inputs), inputs)

    def drop(self) -> None:
        """Give up what was captured."""
        self._graphs.clear()


def cuda_capture() -> Capture:
    """Capture calls as CUDA graphs on the current stream, which no other graph was captured on.

    Empty the allocator's cache before and after. The graphs share a memory pool of their own, so that none writes over what the backbone's return;
    they run one after another, and what one returns is used before the next.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        # Compiles, tunes and allocates what must not be captured.
        function(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Without torch.cuda.graph(), which empties the allocator's cache first: what one call allocated
        # the next one takes, and the caller empties it once.
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
