"""CUDA graphs of a pass: how many canvases they are for, their capture, and their replay.

vLLM captures the backbone, at the sizes that :func:`choose_capture_sizes` names. What a pass
launches besides is captured here, as :class:`CanvasGraphs`; which functions these are is said by
``graph_calls`` of ``sampling/sampling_graphs.py`` and of ``families/diffusion_gemma/state.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, SchedulerConfig

# Beyond this many canvases, and this many rows, launches cost nothing next to the work they start.
MAX_CANVASES = 64
MAX_ROWS = 4096
# Up to here every count has a graph of the backbone; above, every second, and the runner pads: by
# one canvas in 17 at most.
MAX_EXACT = 16
# Canvases of the largest pass with other sampling settings that has a graph.
MOST_ADJUSTED_CANVASES = 8
# What the driver keeps of a graph besides its tensors; vLLM counts at least as much of its own.
BYTES_OF_A_GRAPH = 2**20
# Rows of a tile of a matrix product, which takes as long with fewer. Passes of short canvases are
# padded to whole ones.
TILE_ROWS = 128


def most_canvases(canvas_length: int) -> int:
    """Return the largest number of canvases that gets a graph, however many a pass may have."""
    return max(MAX_CANVASES, MAX_ROWS // canvas_length)


def capture_sizes(canvas_length: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Rows of the passes that vLLM is to capture.

    Whole canvases of 1 to ``max_num_seqs`` requests, and up to twice as many where finished
    canvases are encoded in the same pass. Short prompts take the smallest of them.

    Args:
        canvas_length: Rows of a canvas.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Rows of the largest pass.
    """
    most = min(2 * max_num_seqs, most_canvases(canvas_length))
    step = max(2, TILE_ROWS // canvas_length)
    counts = {*range(1, min(most, MAX_EXACT) + 1), *range(step, most + 1, step), most}
    rows = sorted(count * canvas_length for count in counts)
    return [number for number in rows if number <= max_num_batched_tokens]


def choose_capture_sizes(
    compilation: CompilationConfig, scheduler: SchedulerConfig, canvas_length: int
) -> list[int] | None:
    """Return the rows of passes that vLLM captures: whole canvases, where the operator names no
    sizes.

    By itself it stops at 512 rows (1,024 on SM100), which is two canvases of 256.

    Args:
        compilation: Configuration with the operator's sizes.
        scheduler: Configuration with the limits of a pass.
        canvas_length: Rows of a canvas.
    """
    from vllm.platforms import current_platform

    sizes: list[int] | None = compilation.cudagraph_capture_sizes
    if (
        current_platform.is_cpu()
        or sizes is not None
        or compilation.max_cudagraph_capture_size is not None
    ):
        return sizes
    return capture_sizes(canvas_length, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)


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

    @property
    def is_captured(self) -> bool:
        """True if calls with some shapes replay a graph."""
        return bool(self._graphs)

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


class GraphCall(NamedTuple):
    """A call that becomes a graph; the values of its tensors do not matter.

    Attributes:
        function: What is called.
        inputs: Each replay reads its inputs from them.
        others: Other arguments, the same in every replay.
    """

    function: GraphedFunction
    inputs: tuple[Tensor, ...] = ()
    others: dict[str, Any] = {}


class CanvasGraphs:
    """What a pass launches besides the backbone, captured for numbers of whole canvases.

    Attributes:
        most: The largest number; 0 if nothing is captured.
        is_sample: While vLLM measures what graphs take: only the largest of each is captured.
    """

    def __init__(self, most: int, calls: Callable[[range], list[GraphCall]]) -> None:
        """Capture nothing yet.

        Args:
            most: Canvases of the largest graph.
            calls: The calls for some numbers of canvases, the largest first.
        """
        self.most = most
        self.is_sample = False
        self._calls = calls
        self._captured: list[GraphedFunction] = []

    def capture_on(self, device: torch.device) -> None:
        """Capture CUDA graphs, after vLLM's of the backbone.

        Raises:
            RuntimeError: If a capture fails.
        """
        from vllm.distributed.parallel_state import graph_capture

        if self.most == 0:
            return
        try:
            # What captures allocate from here on they take from one another.
            torch.accelerator.empty_cache()
            with graph_capture(device=device):
                self.capture(cuda_capture())
            # What the calls before each capture allocated is not part of a graph.
            torch.accelerator.empty_cache()
        except RuntimeError as error:
            raise RuntimeError(
                "Capturing CUDA graphs of embedding and sampling failed; start with "
                f"--enforce-eager to serve without graphs. Cause: {error}"
            ) from error

    def capture(self, capture: Capture) -> None:
        """Capture every call.

        Args:
            capture: :func:`cuda_capture`, or what stands in for it.
        """
        for call in self._calls_of(self.is_sample):
            call.function.capture(capture, *call.inputs, **call.others)
            self._captured.append(call.function)

    def drop(self) -> None:
        """Give up what was captured."""
        for function in self._captured:
            function.drop()
        self._captured.clear()

    def bytes_of_others(self) -> int:
        """Return the driver's bytes for graphs that a sample does not contain.

        Their tensors are shared with the largest graph.
        """
        return (len(self._calls_of(False)) - len(self._calls_of(True))) * BYTES_OF_A_GRAPH

    def _calls_of(self, is_sample: bool) -> list[GraphCall]:
        if self.most == 0:
            return []
        return self._calls(range(self.most, self.most - 1 if is_sample else 0, -1))

    @contextmanager
    def sample(self) -> Iterator[None]:
        """While vLLM measures what graphs take, of the largest of its own, and drops them."""
        self.is_sample = True
        try:
            yield
        finally:
            self.is_sample = False
            self.drop()
