"""What is launched: which tiles, in how many splits, with how much scratch."""

import torch
import triton
from torch import Tensor

from attention_kernels.canvas_attention.triton.configs import TritonConfig, choose_config
from attention_kernels.canvas_attention.triton.kernels import (
    LOG2_E,
    canvas_attention_kernel,
    combine_kernel,
)

# Added to or taken from a position it leaves every key in reach, and fits int32 with it.
NO_WINDOW = 2**30
# The most fp32 scratch of one launch. A tile of 64 rows with 2 key heads of 512 takes 2 MiB when it
# is cut into 8 splits: 128 such tiles, or 2,048 programs, fill any GPU several times over.
SCRATCH_BYTES = 256 * 2**20
# Sequences with more rows than this fill a GPU without splits.
MAX_SPLIT_ROWS = 512
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
    max_query_len: int | None,
    max_seq_len: int | None,
) -> None:
    """Write the attention of every live row into ``out``; arguments as in ``api.py``."""
    _check_supported(query)
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
        query.shape[0] if max_query_len is None else max_query_len,
        block_table.shape[1] * key_cache.shape[1] if max_seq_len is None else max_seq_len,
    )


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
    scale: float,
    value_factor: float,
    softcap: float,
    window_left: int,
    window_right: int,
    canvas_anchor: bool,
    max_query_len: int,
    max_seq_len: int,
    config: TritonConfig | None = None,
    visited: Tensor | None = None,
) -> None:
    """Launch the kernels on checked arguments.

    ``config`` fixes how the work is cut; ``visited`` [num_seqs], int32, counts the key tiles that
    the programs of each sequence computed.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    num_seqs = seq_lens.shape[0]
    if config is None:
        config = choose_config(query, key_cache.dtype)
    cut = _constants(config, num_heads // num_kv_heads, head_dim, canvas_anchor, row_spans)
    block_q = config.block_m // cut["HEADS"]
    num_tiles = (num_tokens + num_seqs * (block_q - 1)) // block_q
    head_programs = num_kv_heads * -(-cut["GROUP"] // cut["HEADS"])
    num_splits = _num_splits(config, window_left, row_spans, max_query_len, max_seq_len)

    launch_tiles = num_tiles
    part_acc = part_max = part_sum = None
    if num_splits > 1:
        rows_per_tile = head_programs * num_splits * config.block_m
        launch_tiles = min(
            num_tiles, max(1, SCRATCH_BYTES // (rows_per_tile * (cut["BLOCK_D"] + 2) * 4))
        )
        part_acc = _scratch(launch_tiles * rows_per_tile, cut["BLOCK_D"], query.device)
        part_max, part_sum = _scratch(2, launch_tiles * rows_per_tile, query.device).unbind()

    if key_cache.dtype == torch.float8_e4m3fn:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        scale, value_factor = scale * FP8_FACTOR, value_factor * FP8_FACTOR
    windows = [NO_WINDOW if window < 0 else window for window in (window_left, window_right)]
    for first_tile in range(0, num_tiles, launch_tiles):
        grid = (min(launch_tiles, num_tiles - first_tile), head_programs)
        canvas_attention_kernel[(*grid, num_splits)](
            query,
            key_cache,
            value_cache,
            out,
            block_table,
            query_start_loc,
            seq_lens,
            causal_rows,
            row_spans,
            key_scale,
            value_scale,
            part_acc,
            part_max,
            part_sum,
            visited,
            num_seqs,
            first_tile,
            *windows,
            scale if softcap > 0 else scale * LOG2_E.value,
            softcap,
            value_factor,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *out.stride()[:2],
            block_table.stride(0),
            **cut,
            CACHE_BLOCK=key_cache.shape[1],
            HAS_SOFTCAP=softcap > 0,
            # Triton's interpreter multiplies the bits of bf16 operands as integers.
            UPCAST=INTERPRETED and query.dtype == torch.bfloat16,
            SPLIT=num_splits > 1,
            COUNT=visited is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if num_splits > 1:
            combine_kernel[(*grid, -(-config.block_m // COMBINE_ROWS))](
                out,
                query_start_loc,
                seq_lens,
                causal_rows,
                row_spans,
                value_scale,
                part_acc,
                part_max,
                part_sum,
                num_splits,
                num_seqs,
                first_tile,
                *windows,
                value_factor,
                *out.stride()[:2],
                **cut,
                ROWS=COMBINE_ROWS,
                num_warps=4,
            )


def _check_supported(query: Tensor) -> None:
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


def _constants(
    config: TritonConfig,
    group: int,
    head_dim: int,
    canvas_anchor: bool,
    row_spans: Tensor | None,
) -> dict[str, int | bool]:
    """The compile-time arguments that both kernels share."""
    return {
        "GROUP": group,
        "HEADS": min(group, config.block_m),
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CANVAS_ANCHOR": canvas_anchor,
        "HAS_SPANS": row_spans is not None,
        "MIN_SPLIT": config.min_split_keys,
        "MAX_SPLITS": config.max_splits,
        "MAX_ROWS": MAX_SPLIT_ROWS,
        "WIDTH": SEARCH_WIDTH,
    }


def _num_splits(
    config: TritonConfig,
    window_left: int,
    row_spans: Tensor | None,
    max_query_len: int,
    max_seq_len: int,
) -> int:
    """Splits that the longest reach within the caller's bounds can need.

    Only how many programs are launched: where a tile is cut is decided on the device, from its
    own sequence.
    """
    reach = max_seq_len
    if window_left >= 0 and row_spans is None:
        reach = min(reach, window_left + max_query_len)
    # One tile more than the reach fills, since it need not start on a border.
    tiles = -(-reach // config.block_n) + 1
    return min(config.max_splits, max(1, -(-tiles // (config.min_split_keys // config.block_n))))


def _scratch(rows: int, columns: int, device: torch.device) -> Tensor:
    """Uninitialised memory for partials; every number read from it was written in the launch."""
    return torch.empty(rows, columns, dtype=torch.float32, device=device)


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
    )


@_canvas_attention_op.register_fake
def _(*args: object, **kwargs: object) -> None:
    """Writes ``out`` and returns nothing."""
