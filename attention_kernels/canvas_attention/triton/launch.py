"""What is launched: which tiles, in how many splits, with how much scratch."""

from collections.abc import Iterable
from typing import Any

import torch
import triton
from torch import Tensor

from attention_kernels.canvas_attention.splits import (
    MIN_SPLIT_KEYS,
    longest_tile,
    multiprocessors,
    splits,
)
from attention_kernels.canvas_attention.triton.configs import TritonConfig, choose_config
from attention_kernels.canvas_attention.triton.kernels import (
    LOG2_E,
    canvas_attention_kernel,
    combine_kernel,
)

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


def canvas_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    *,
    scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    window_anchor: str,
    row_spans: Tensor | None,
    key_scale: float | Tensor | None,
    value_scale: float | Tensor | None,
    out: Tensor,
    max_query_len: int,
    max_seq_len: int,
    batch_invariant: bool,
) -> None:
    """Write the attention of every live row into ``out``; arguments as in ``api.py``."""
    check_supported(query)
    # Numbers are folded on the host; only what lies on the device is read there.
    key_factor = 1.0 if key_scale is None or isinstance(key_scale, Tensor) else key_scale
    value_factor = 1.0 if value_scale is None or isinstance(value_scale, Tensor) else value_scale
    run = _canvas_attention_op if torch.compiler.is_compiling() else launch
    run(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        causal_rows,
        out,
        row_spans,
        key_scale if isinstance(key_scale, Tensor) else None,
        value_scale if isinstance(value_scale, Tensor) else None,
        scale * key_factor,
        value_factor,
        softcap,
        window_left,
        window_right,
        window_anchor == "canvas",
        max_query_len,
        max_seq_len,
        batch_invariant,
    )


class CanvasLaunch:
    """What the layers of a kind launch in one step, from arguments that were checked before.

    Nothing in it was computed on the device and it owns no memory there, so one that ran before a
    graph was captured may run in it.
    """

    def __init__(
        self,
        query: Tensor,
        key_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        causal_rows: Tensor,
        row_spans: Tensor | None,
        scale: float,
        value_factor: float,
        softcap: float,
        window_left: int,
        window_right: int,
        canvas_anchor: bool,
        max_query_len: int,
        max_seq_len: int,
        batch_invariant: bool = False,
        config: TritonConfig | None = None,
        num_splits: int | None = None,
        visited: Tensor | None = None,
    ) -> None:
        """Arguments as of ``canvas_attention``; of ``query`` and ``key_cache`` only the kind counts.

        ``config`` and ``num_splits`` fix how the work is cut; ``visited`` [num_seqs], int32, counts
        the key tiles that the programs of each sequence computed.
        """
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key_cache.shape[2]
        num_seqs = seq_lens.shape[0]
        if config is None:
            config = choose_config(query, key_cache.dtype)
        group = num_heads // num_kv_heads
        heads = min(group, config.block_m)
        block_q = config.block_m // heads
        num_tiles = (num_tokens + num_seqs * (block_q - 1)) // block_q
        block_d = triton.next_power_of_2(head_dim)
        block_v = block_d // config.parts
        head_programs = num_kv_heads * -(-group // heads) * config.parts
        partial_size = config.block_m * (block_v + 2)
        if num_splits is None:
            num_splits = 1
            if not batch_invariant:
                num_splits = splits(
                    # Without the tiles that sequences may leave empty at their ends.
                    -(-num_tokens // block_q) * head_programs,
                    multiprocessors(query.device) * config.programs,
                    longest_tile(window_left, max_query_len),
                    partial_size * 4,
                )
            reach = max_seq_len
            if window_left >= 0 and row_spans is None:
                reach = min(reach, window_left + max_query_len)
            num_splits = min(num_splits, _most_pieces(reach, config.block_n))

        self.grid = (num_tiles, head_programs, num_splits)
        self.scratch_size = num_tiles * head_programs * num_splits * partial_size
        self.is_fp8 = key_cache.dtype == torch.float8_e4m3fn
        if self.is_fp8:
            scale, value_factor = scale * FP8_FACTOR, value_factor * FP8_FACTOR
        self.value_factor = value_factor
        self.batch = (block_table, query_start_loc, seq_lens, causal_rows, row_spans)
        self.visited = visited
        windows = [NO_WINDOW if window < 0 else window for window in (window_left, window_right)]
        self.sizes = (num_seqs, *windows)
        self.factors = (scale if softcap > 0 else scale * LOG2_E.value, softcap, value_factor)
        self.table_stride = block_table.stride(0)
        cut = {
            "GROUP": group,
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d,
            "BLOCK_V": block_v,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "CANVAS_ANCHOR": canvas_anchor,
            "HAS_SPANS": row_spans is not None,
            "MIN_SPLIT": MIN_SPLIT_KEYS,
            "WIDTH": SEARCH_WIDTH,
        }
        self.constants: dict[str, Any] = {
            **cut,
            "CACHE_BLOCK": key_cache.shape[1],
            "HAS_SOFTCAP": softcap > 0,
            # Triton's interpreter multiplies the bits of bf16 operands as integers.
            "UPCAST": INTERPRETED and query.dtype == torch.bfloat16,
            "SPLIT": num_splits > 1,
            "COUNT": visited is not None,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
        self.combine_grid = (num_tiles, head_programs, -(-config.block_m // COMBINE_ROWS))
        self.combine_constants = {**cut, "ROWS": COMBINE_ROWS, "num_warps": 4}

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
    ) -> None:
        """Launch for a layer; rows behind those of the step are neither read nor written."""
        if self.is_fp8:
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        part = None
        if self.grid[2] > 1:
            part = _scratch(self.scratch_size, query.device)
        out_strides = out.stride()[:2]
        canvas_attention_kernel[self.grid](
            query,
            key_cache,
            value_cache,
            out,
            *self.batch,
            key_scale,
            value_scale,
            part,
            self.visited,
            *self.sizes,
            *self.factors,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
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


def plan(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    *,
    scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    window_anchor: str,
    row_spans: Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    batch_invariant: bool,
    num_splits: int | None = None,
) -> CanvasLaunch:
    """The launch of a step; arguments as in ``api.py``, and ``num_splits`` as in the class."""
    check_supported(query)
    return CanvasLaunch(
        query,
        key_cache,
        block_table,
        query_start_loc,
        seq_lens,
        causal_rows,
        row_spans,
        scale,
        1.0,
        softcap,
        window_left,
        window_right,
        window_anchor == "canvas",
        max_query_len,
        max_seq_len,
        batch_invariant,
        num_splits=num_splits,
    )


def warm_up(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    with_spans: Iterable[bool],
    batch_invariant: bool,
    **options: Any,
) -> None:
    """Compile each variant for layers of this kind, by launching it on a sequence without rows."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=query.device)

    check_supported(query)
    out = torch.empty_like(query)
    for row_spans in (zeros(query.shape[0], 2) if spans else None for spans in with_spans):
        for num_splits in (1,) if batch_invariant else (1, 2):
            step = plan(
                query,
                key_cache,
                *(zeros(1, 1), zeros(2), zeros(1), zeros(1)),
                row_spans=row_spans,
                max_query_len=query.shape[0],
                max_seq_len=key_cache.shape[1],
                batch_invariant=batch_invariant,
                num_splits=num_splits,
                **options,
            )
            step(query, key_cache, value_cache, out, key_scale, value_scale)


def _most_pieces(reach: int, block_n: int) -> int:
    """Pieces of the longest tile; where a tile is cut, its own sequence decides on the device."""
    # One key tile more than the reach fills, since it need not start on a border.
    key_tiles = -(-reach // block_n) + 1
    return max(1, -(-key_tiles // (MIN_SPLIT_KEYS // block_n)))


def launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    out: Tensor,
    row_spans: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    *step: Any,
    **fixed: Any,
) -> None:
    """Launch the kernels once; the arguments behind the tensors are those of ``CanvasLaunch``."""
    CanvasLaunch(
        query,
        key_cache,
        block_table,
        query_start_loc,
        seq_lens,
        causal_rows,
        row_spans,
        *step,
        **fixed,
    )(query, key_cache, value_cache, out, key_scale, value_scale)


def check_supported(query: Tensor) -> None:
    """Raise ValueError or NotImplementedError for what these kernels do not take."""
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


@torch.library.custom_op("attention_kernels::canvas_attention_triton", mutates_args=("out",))
def _canvas_attention_op(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    out: Tensor,
    row_spans: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    scale: float,
    value_factor: float,
    softcap: float,
    window_left: int,
    window_right: int,
    canvas_anchor: bool,
    max_query_len: int,
    max_seq_len: int,
    batch_invariant: bool,
) -> None:
    launch(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        causal_rows,
        out,
        row_spans,
        key_scale,
        value_scale,
        scale,
        value_factor,
        softcap,
        window_left,
        window_right,
        canvas_anchor,
        max_query_len,
        max_seq_len,
        batch_invariant,
    )


@_canvas_attention_op.register_fake
def _(*args: object, **kwargs: object) -> None:
    """Writes ``out`` and returns nothing."""
