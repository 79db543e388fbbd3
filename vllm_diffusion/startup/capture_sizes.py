"""Sizes of passes that vLLM captures as CUDA graphs, where the operator names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, SchedulerConfig


# Beyond this many canvases a launch costs nothing next to the work it starts.
MAX_CANVASES = 64
# Up to here every count has a graph of the backbone; above, every second, and the runner pads: by
# one canvas in 17 at most.
MAX_EXACT = 16
# Rows of a tile of a matrix product, which takes as long with fewer. Passes of short canvases are
# padded to whole ones.
TILE_ROWS = 128


def canvas_counts(canvas_length: int, most: int) -> list[int]:
    """Numbers of canvases that get a graph of the backbone, ascending, up to ``most``."""
    most = min(most, MAX_CANVASES)
    step = max(2, TILE_ROWS // canvas_length)
    return sorted({*range(1, min(most, MAX_EXACT) + 1), *range(step, most + 1, step), most})


def capture_sizes(canvas_length: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Rows of the passes that vLLM is to capture.

    Whole canvases of 1 to ``max_num_seqs`` requests, and up to twice as many where finished
    canvases are encoded in the same pass. Short prompts take the smallest of them.

    Args:
        canvas_length: Rows of a canvas.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Rows of the largest pass.
    """
    counts = canvas_counts(canvas_length, 2 * max_num_seqs)
    return [n * canvas_length for n in counts if n * canvas_length <= max_num_batched_tokens]


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
