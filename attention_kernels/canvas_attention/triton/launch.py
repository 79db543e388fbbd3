"""Launches of the kernels: tiles, splits and scratch memory."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attention_kernels.canvas_attention.batch import (
    AttentionOptions,
    PagedCache,
    Sequences,
)
from attention_kernels.canvas_attention.splits import (
    MIN_SPLIT_KEYS,
    longest_tile,
    multiprocessors,
    splits,
)
from attention_kernels.canvas_attention.triton.attend import canvas_attention_kernel
from attention_kernels.canvas_attention.triton.combine import combine_kernel
from attention_kernels.canvas_attention.triton.configs import TritonConfig, choose_config
from attention_kernels.canvas_attention.triton.tiles import LOG2_E

# Added to or taken from a position it leaves every key in reach, and fits int32 with it.
NO_WINDOW = 2**30
# Sequence lengths read at once when a program looks for its sequence.
SEARCH_WIDTH = 128
# Rows that one program of the combine kernel folds.
COMBINE_ROWS = 8
# What the kernel makes of an E4M3 byte is this much smaller.
FP8_FACTOR = 256.0
# Fixed when the kernels below are decorated, so it is read once, here.
INTERPRETED: bool = triton.knobs.runtime.interpret
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attend(
    query: Tensor,
    cache: PagedCache,
    sequences: Sequences,
    options: AttentionOptions,
    out: Tensor,
    *,
    num_splits: int | None = None,
) -> None:
    """Write the attention of every live row into ``out``; arguments as in ``api.py``.

    ``num_splits`` is the number of pieces that keys are cut into; chosen if left out.

    Raises:
        ValueError: If the dtype or the head size has no kernel.
        NotImplementedError: Without a GPU and without Triton's interpreter.
    """
    check_inputs(query)
    cut = Cut(num_splits=num_splits)
    CanvasLaunch(query, cache, sequences, options, cut)(query, cache, out)


def _number(scale: float | Tensor | None, otherwise: float) -> float:
    """A scale that the host knows; ``otherwise`` where there is none, or the device has it."""
    return otherwise if scale is None or isinstance(scale, Tensor) else scale


@dataclass(frozen=True)
class Cut:
    """Tile sizes and splits of a launch, set by tests and tuning instead of chosen.

    Attributes:
        config: Tile sizes, warps and stages.
        num_splits: Programs that share the keys of a query tile.
        visited: [num_seqs], int32: counts the key tiles that the programs of each sequence compute.
    """

    config: TritonConfig | None = None
    num_splits: int | None = None
    visited: Tensor | None = None


class CanvasLaunch:
    """Launch of the layers of a kind in one step, from checked arguments.

    Nothing in it was computed on the device and it owns no memory there, so a launch that ran
    before a graph was captured may run in the graph.
    """

    def __init__(
        self,
        query: Tensor,
        cache: PagedCache,
        sequences: Sequences,
        options: AttentionOptions,
        cut: Cut = Cut(),
    ) -> None:
        """Arguments as of ``canvas_attention``; of ``query`` and ``cache`` only the kind counts.

        Scales of the cache that are numbers are folded here; others come with each layer.
        """
        window = options.window
        config, num_splits = cut.config, cut.num_splits
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = cache.key.shape[2]
        num_seqs = sequences.seq_lens.shape[0]
        if config is None:
            config = choose_config(query, cache.key.dtype)
        group = num_heads // num_kv_heads
        heads = min(group, config.block_m)
        block_q = config.block_m // heads
        num_tiles = (num_tokens + num_seqs * (block_q - 1)) // block_q
        block_d = triton.next_power_of_2(head_dim)
        block_v = block_d // config.parts
        head_programs = num_kv_heads * -(-group // heads) * config.parts
        partial_size = config.block_m * (block_v + 2)
        if num_splits is None:
            num_splits = splits(
                # Without the tiles that sequences may leave empty at their ends.
                -(-num_tokens // block_q) * head_programs,
                multiprocessors(query.device) * config.programs,
                longest_tile(window.left, sequences.query_bound),
                partial_size * 4,
                options.most_splits,
            )
            reach = sequences.key_bound
            if window.left >= 0 and sequences.row_spans is None:
                reach = min(reach, window.left + sequences.query_bound)
            num_splits = min(num_splits, _most_pieces(reach, config.block_n))

        self.grid = (num_tiles, head_programs, num_splits)
        self.scratch_size = num_tiles * head_programs * num_splits * partial_size
        # Numbers are folded on the host; only what lies on the device is read there.
        scale = options.scale * _number(cache.key_scale, 1.0)
        value_factor = _number(cache.value_scale, 1.0)
        if cache.is_fp8:
            scale, value_factor = scale * FP8_FACTOR, value_factor * FP8_FACTOR
        self.value_factor = value_factor
        self.batch = (
            sequences.block_table,
            sequences.query_start_loc,
            sequences.seq_lens,
            sequences.causal_rows,
            sequences.row_spans,
        )
        self.visited = cut.visited
        windows = [NO_WINDOW if size < 0 else size for size in (window.left, window.right)]
        self.sizes = (num_seqs, *windows)
        softcap = options.softcap
        self.factors = (scale if softcap > 0 else scale * LOG2_E.value, softcap, value_factor)
        self.table_stride = sequences.block_table.stride(0)
        sizes = {
            "GROUP": group,
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d,
            "BLOCK_V": block_v,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "CANVAS_ANCHOR": window.anchor == "canvas",
            "HAS_SPANS": sequences.row_spans is not None,
            "MIN_SPLIT": MIN_SPLIT_KEYS,
            "WIDTH": SEARCH_WIDTH,
        }
        self.constants: dict[str, Any] = {
            **sizes,
            "CACHE_BLOCK": cache.key.shape[1],
            "HAS_SOFTCAP": softcap > 0,
            # Triton's interpreter multiplies the bits of bf16 operands as integers.
            "UPCAST": INTERPRETED and query.dtype == torch.bfloat16,
            "SPLIT": num_splits > 1,
            "COUNT": cut.visited is not None,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
        self.combine_grid = (num_tiles, head_programs, -(-config.block_m // COMBINE_ROWS))
        self.combine_constants = {**sizes, "ROWS": COMBINE_ROWS, "num_warps": 4}

    def __call__(self, query: Tensor, cache: PagedCache, out: Tensor) -> None:
        """Launch for a layer; rows after those of the step are neither read nor written."""
        key, value, key_scale, value_scale = cache
        if cache.is_fp8:
            key, value = key.view(torch.uint8), value.view(torch.uint8)
        key_scale = key_scale if isinstance(key_scale, Tensor) else None
        value_scale = value_scale if isinstance(value_scale, Tensor) else None
        part = None
        if self.grid[2] > 1:
            part = _scratch(self.scratch_size, query.device)
        out_strides = out.stride()[:2]
        canvas_attention_kernel[self.grid](
            query,
            key,
            value,
            out,
            *self.batch,
            key_scale,
            value_scale,
            part,
            self.visited,
            *self.sizes,
            *self.factors,
            *query.stride()[:2],
            *key.stride()[:3],
            *value.stride()[:3],
            *out_strides,
            self.table_stride,
            **self.constants,
        )
        if part is not None:
            combine_kernel[self.combine_grid](
                out,
                *self.batch[1:],
                value_scale,
                part,
                self.grid[2],
                *self.sizes,
                self.value_factor,
                *out_strides,
                **self.combine_constants,
            )


def _most_pieces(reach: int, block_n: int) -> int:
    """Pieces of the longest tile; where a tile is cut, its own sequence decides on the device."""
    # One key tile more than the reach fills, since it need not start on a border.
    key_tiles = -(-reach // block_n) + 1
    return max(1, -(-key_tiles // (MIN_SPLIT_KEYS // block_n)))


def check_inputs(query: Tensor) -> None:
    """Refuse what these kernels do not take.

    Raises:
        ValueError: If the dtype or the head size has no kernel.
        NotImplementedError: Without a GPU and without Triton's interpreter.
    """
    if query.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f'query has dtype {query.dtype}; impl="triton" takes '
            f'{", ".join(map(str, SUPPORTED_DTYPES))}. Use impl="reference" for others.'
        )
    if not 16 <= query.shape[2] <= 512:
        raise ValueError(
            f'query has head_dim {query.shape[2]}; impl="triton" takes 16 to 512. Use '
            'impl="reference" for others.'
        )
    if query.device.type != "cuda" and not INTERPRETED:
        raise NotImplementedError(
            f'impl="triton" needs CUDA tensors and got {query.device}; set TRITON_INTERPRET=1 '
            'before Python starts to run it on a CPU, or use impl="reference".'
        )


def _scratch(size: int, device: torch.device) -> Tensor:
    """Uninitialised memory for partials; every number read from it was written in the launch."""
    return torch.empty(size, dtype=torch.float32, device=device)
