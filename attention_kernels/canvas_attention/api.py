"""The public function: check the arguments, choose an implementation, call it."""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from attention_kernels.canvas_attention.reference import canvas_attention_reference

Impl = Literal["auto", "reference", "triton", "cute"]
WindowAnchor = Literal["canvas", "query"]

FP8 = torch.float8_e4m3fn
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

logger = logging.getLogger(__name__)


def canvas_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    window_anchor: WindowAnchor = "canvas",
    row_spans: Tensor | None = None,
    key_scale: float | Tensor | None = None,
    value_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    batch_invariant: bool = False,
    check_values: bool = False,
) -> Tensor:
    """Paged attention of sequences whose head is causal and whose tail is a canvas.

    Of a sequence with L keys the last Q are queries: row r stands at position p = L - Q + r. With
    c = ``causal_rows`` of the sequence and its canvas starting at s = L - Q + c, key j is seen by

    - a causal row (r < c) if ``p - window_left <= j <= p``, or if j is in the row's image span;
    - a canvas row (r >= c) if ``s - window_left <= j < L`` with ``window_anchor="canvas"``, or
      ``p - window_left <= j <= p + window_right`` (and j < L) with ``window_anchor="query"``.

    A window of -1 leaves that side open. A row that sees nothing gives zeros. The new keys and
    values must be in the cache before the call.

    Args:
        query: [num_tokens, num_q_heads, head_dim], bf16, fp16, fp32, or fp64 (reference only);
            last dim contiguous. Rows from ``query_start_loc[-1]`` on are padding and never read.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim] in the dtype of ``query`` or
            float8_e4m3fn; any strides with the last dim contiguous, so a view of a cache that
            interleaves keys and values, or heads and positions, needs no copy.
        value_cache: As ``key_cache``.
        block_table: [num_seqs, max_blocks], int32. Entries beyond a sequence's keys are not read.
        query_start_loc: [num_seqs + 1], int32: where the rows of each sequence start.
        seq_lens: [num_seqs], int32: keys of each sequence, its query rows included.
        causal_rows: [num_seqs], int32: leading query rows that attend causally, 0 to Q.
        scale: Multiplies the scores.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 is off.
        window_left: Keys seen before the anchor, excluding it; -1 for all. A model's
            ``sliding_window`` W is ``window_left = W - 1``.
        window_right: Keys a canvas row sees after itself, only with ``window_anchor="query"``.
        window_anchor: What the window of a canvas row is tied to: the first position of its
            canvas, so that all its rows see the same keys, or the row itself.
        row_spans: [num_tokens, 2], int32: half-open key interval of the image a row lies in (it
            holds the row's own position), start == end where there is none. Counts on causal rows
            only.
        key_scale: What an FP8 key is multiplied by: a number, or one fp32 number on the device.
        value_scale: As ``key_scale``, for values.
        out: [num_tokens, num_q_heads, head_dim] like ``query``; written in place. Padding rows
            are left as they are; without ``out`` they are zero.
        impl: ``"auto"``, ``"reference"``, ``"triton"`` or ``"cute"``. Only ``"auto"`` chooses,
            and never ``"cute"``: that extends FlashAttention-4 for compute capability 9.x
            (head_dim 256 and 512) and 10.x (256), compiles for both, and has run on neither. It
            takes bf16 and fp16 without ``row_spans``.
        max_query_len: At least the longest query of the batch, if the caller knows it on the host.
            Sizes a launch; a result may be rounded in another order. Defaults to what the shapes
            allow.
        max_seq_len: As ``max_query_len``, for keys.
        batch_invariant: The output of a sequence is the same bits whoever shares its batch. Costs
            a few sequences with many keys the programs that would fill a GPU.
        check_values: Also check values that lie on the device, and wait for it. For debugging.

    Returns:
        ``out``, or a new tensor like it. Softmax runs in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: If shapes, dtypes, devices or options disagree.
        NotImplementedError: If ``impl`` cannot run these inputs.
    """
    batch = (block_table, query_start_loc, seq_lens, causal_rows)
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "window_left": window_left,
        "window_right": window_right,
        "window_anchor": window_anchor,
        "row_spans": row_spans,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
        "batch_invariant": batch_invariant,
    }
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    _check(query, key_cache, value_cache, batch, options, **scales, out=out, impl=impl)
    if check_values:
        _check_values(
            query, key_cache, block_table, query_start_loc, seq_lens, causal_rows, row_spans
        )
    if out is None:
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    if query.numel() == 0 or seq_lens.numel() == 0:
        return out

    implementation = _implementation(_choose(query) if impl == "auto" else impl)
    implementation(query, key_cache, value_cache, *batch, **options, **scales, out=out)
    return out


class Planned(Protocol):
    """One layer's attention in a step that was planned."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
    ) -> None:
        """Write the attention of the step's rows into ``out``; rows behind them are padding.

        Nothing is checked: the tensors are like those of the plan, and the scales are those of
        :func:`canvas_attention`, as tensors.
        """


def plan_canvas_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    window_anchor: WindowAnchor = "canvas",
    row_spans: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    batch_invariant: bool = False,
) -> Planned:
    """Check once what the layers of a kind share in a step, and keep what it comes to.

    Arguments are those of :func:`canvas_attention` for one layer. Nothing is computed on the device
    and no memory of it is held but the tensors of the batch, whose values are read when a layer
    runs: the plan may be older than a graph that is captured with it.

    Returns:
        What runs each layer whose tensors have the shapes, dtypes and devices of these.

    Raises:
        ValueError: If shapes, dtypes, devices or options disagree.
        NotImplementedError: If ``impl`` cannot run these inputs.
    """
    batch = (block_table, query_start_loc, seq_lens, causal_rows)
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "window_left": window_left,
        "window_right": window_right,
        "window_anchor": window_anchor,
        "row_spans": row_spans,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
        "batch_invariant": batch_invariant,
    }
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    _check(query, key_cache, value_cache, batch, options, **scales, out=out, impl=impl)
    chosen = _choose(query) if impl == "auto" else impl
    implementation = _implementation(chosen)
    if chosen == "triton":
        from attention_kernels.canvas_attention.triton.launch import plan

        return plan(query, key_cache, *batch, **options)
    num_tokens = query.shape[0]

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
    ) -> None:
        implementation(
            query[:num_tokens],
            key_cache,
            value_cache,
            *batch,
            key_scale=key_scale,
            value_scale=value_scale,
            out=out[:num_tokens],
            **options,
        )

    return run


def warm_up_canvas_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    window_anchor: WindowAnchor = "canvas",
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    with_spans: Iterable[bool] = (False,),
    impl: Impl = "auto",
    batch_invariant: bool = False,
) -> None:
    """Compile every kernel that layers of a kind may launch, whatever the rows of a step.

    Arguments are those of :func:`plan_canvas_attention`, and ``with_spans``: whether steps have
    ``row_spans``, or both where some do. No value of the tensors is read.
    """
    _check_options(softcap, window_left, window_right, window_anchor, impl)
    _check_tensors(query, key_cache, value_cache, None, None)
    _check_scales(key_cache, query.device, key_scale, value_scale)
    chosen = _choose(query) if impl == "auto" else impl
    if chosen == "reference":
        return
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "window_left": window_left,
        "window_right": window_right,
        "window_anchor": window_anchor,
        "with_spans": with_spans,
        "batch_invariant": batch_invariant,
    }
    if chosen == "cute":
        from attention_kernels.canvas_attention.cute.launch import warm_up as warm_up_cute

        warm_up_cute(query, key_cache, value_cache, **options)
        return
    from attention_kernels.canvas_attention.triton.launch import warm_up

    options |= {"key_scale": key_scale, "value_scale": value_scale}
    warm_up(query, key_cache, value_cache, **options)


def _implementation(impl: Impl) -> Callable[..., None]:
    """The function behind a name; what is not installed is imported only when it is asked for."""
    if impl == "reference":
        return canvas_attention_reference
    if impl == "triton":
        try:
            from attention_kernels.canvas_attention.triton.launch import (
                canvas_attention_triton,
            )
        except ImportError as error:
            raise NotImplementedError(
                f'impl="triton" cannot be imported ({error}); install triton or use '
                'impl="reference".'
            ) from error
        return canvas_attention_triton
    # What it extends is imported when a kernel is compiled, for a GPU that can run it.
    from attention_kernels.canvas_attention.cute.launch import canvas_attention_cute

    return canvas_attention_cute


def _choose(query: Tensor) -> Impl:
    """What ``impl="auto"`` runs, logged once per choice."""
    choice: Impl = "reference"
    reason = f"the tensors are on {query.device.type}"
    if query.device.type == "cuda":
        if query.dtype == torch.float64 or not 16 <= query.shape[2] <= 512:
            reason = f"no kernel takes {query.dtype} with head_dim {query.shape[2]}"
        else:
            choice = "triton"
    # A compiler that traces this function must not find a log call in it.
    if not torch.compiler.is_compiling():
        _log_choice(choice, reason)
    return choice


@functools.cache
def _log_choice(choice: str, reason: str) -> None:
    logger.info("canvas attention runs %s: %s.", choice, reason)


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    options: dict[str, Any],
    *,
    key_scale: float | Tensor | None,
    value_scale: float | Tensor | None,
    out: Tensor | None,
    impl: str,
) -> None:
    """Raise for what disagrees, and put what the shapes allow where a bound is left out."""
    windows = (options["window_left"], options["window_right"], options["window_anchor"])
    _check_options(options["softcap"], *windows, impl)
    _check_tensors(query, key_cache, value_cache, options["row_spans"], out)
    _check_batch(query, *batch)
    _check_scales(key_cache, query.device, key_scale, value_scale)
    allowed = {
        "max_query_len": query.shape[0],
        "max_seq_len": batch[0].shape[1] * key_cache.shape[1],
    }
    for name, most in allowed.items():
        if options[name] is None:
            options[name] = most
        elif options[name] < 0:
            raise ValueError(f"{name}={options[name]} must be at least 0, or left out.")


def _check_options(
    softcap: float, window_left: int, window_right: int, window_anchor: str, impl: str
) -> None:
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} is not one of {', '.join(get_args(Impl))}.")
    if window_anchor not in get_args(WindowAnchor):
        raise ValueError(
            f"window_anchor={window_anchor!r} is not one of {', '.join(get_args(WindowAnchor))}."
        )
    for name, window in (("window_left", window_left), ("window_right", window_right)):
        if window < -1:
            raise ValueError(
                f"{name}={window} must be -1 (no window) or the number of keys on that side, >= 0."
            )
    if window_anchor == "canvas" and window_right != -1:
        raise ValueError(
            f"window_right={window_right} has no meaning with window_anchor='canvas', where every "
            "canvas row sees up to the last key; set window_right to -1 or window_anchor to 'query'."
        )
    if not softcap >= 0:
        raise ValueError(f"softcap={softcap} must be 0 (off) or positive.")


def _check_tensors(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    row_spans: Tensor | None,
    out: Tensor | None,
) -> None:
    if query.dim() != 3:
        raise ValueError(
            f"query has shape {_shape(query)}; it must be [num_tokens, num_q_heads, head_dim]."
        )
    if query.dtype not in QUERY_DTYPES:
        raise ValueError(
            f"query has dtype {query.dtype}; allowed are {', '.join(map(str, QUERY_DTYPES))}."
        )
    if key_cache.dim() != 4:
        raise ValueError(
            f"key_cache has shape {_shape(key_cache)}; it must be "
            "[num_blocks, block_size, num_kv_heads, head_dim]."
        )
    if value_cache.shape != key_cache.shape or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"value_cache is {value_cache.dtype} {_shape(value_cache)}; it must be like key_cache, "
            f"{key_cache.dtype} {_shape(key_cache)}."
        )
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    if key_cache.shape[3] != head_dim:
        raise ValueError(
            f"key_cache has head_dim {key_cache.shape[3]}; it must be that of query, {head_dim}."
        )
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"query has {num_heads} heads; they must be a multiple of the {num_kv_heads} heads of "
            "key_cache."
        )
    if key_cache.dtype not in (query.dtype, FP8):
        raise ValueError(
            f"key_cache has dtype {key_cache.dtype}; allowed are that of query, {query.dtype}, and "
            f"{FP8}. View an FP8 cache that is stored as bytes as {FP8} first."
        )
    named = [("query", query), ("key_cache", key_cache), ("value_cache", value_cache)]
    if out is not None:
        if out.shape != query.shape or out.dtype != query.dtype:
            raise ValueError(
                f"out is {out.dtype} {_shape(out)}; it must be like query, "
                f"{query.dtype} {_shape(query)}."
            )
        named.append(("out", out))
    for name, tensor in named:
        _check_device(name, tensor, query.device)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be 1."
            )
    if row_spans is not None:
        _check_int32("row_spans", row_spans, (query.shape[0], 2), query.device)


def _check_batch(
    query: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
) -> None:
    if seq_lens.dim() != 1:
        raise ValueError(f"seq_lens has shape {_shape(seq_lens)}; it must be [num_seqs].")
    num_seqs = seq_lens.shape[0]
    _check_int32("seq_lens", seq_lens, (num_seqs,), query.device)
    _check_int32("causal_rows", causal_rows, (num_seqs,), query.device)
    _check_int32("query_start_loc", query_start_loc, (num_seqs + 1,), query.device)
    if block_table.dim() != 2:
        raise ValueError(
            f"block_table has shape {_shape(block_table)}; it must be [num_seqs, max_blocks]."
        )
    _check_int32("block_table", block_table, (num_seqs, block_table.shape[1]), query.device)


def _check_int32(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be torch.int32.")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {_shape(tensor)}; it must be {list(shape)}.")
    _check_device(name, tensor, device)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be 1."
        )


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on the query's {device}.")


def _check_scales(
    key_cache: Tensor,
    device: torch.device,
    key_scale: float | Tensor | None,
    value_scale: float | Tensor | None,
) -> None:
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if key_cache.dtype != FP8:
            if scale is not None:
                raise ValueError(
                    f"{name} is given but key_cache has dtype {key_cache.dtype}; scales belong to "
                    f"a {FP8} cache. Leave {name} out."
                )
            continue
        if scale is None:
            raise ValueError(
                f"{name} is missing; a {FP8} cache needs a number or one fp32 number on {device}."
            )
        if isinstance(scale, Tensor):
            if scale.dtype != torch.float32 or scale.numel() != 1:
                raise ValueError(
                    f"{name} is {scale.dtype} {_shape(scale)}; it must hold one torch.float32."
                )
            _check_device(name, scale, device)


def _check_values(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    row_spans: Tensor | None,
) -> None:
    """The checks that read device memory; names the first sequence that breaks a rule."""
    starts = query_start_loc.tolist()
    if starts[0] != 0 or sorted(starts) != starts or starts[-1] > query.shape[0]:
        raise ValueError(
            f"query_start_loc={starts} must rise from 0 to at most num_tokens={query.shape[0]}."
        )
    num_blocks, block_size = key_cache.shape[:2]
    for seq, (seq_len, causal) in enumerate(
        zip(seq_lens.tolist(), causal_rows.tolist(), strict=True)
    ):
        query_len = starts[seq + 1] - starts[seq]
        if not 0 <= causal <= query_len:
            raise ValueError(
                f"causal_rows[{seq}]={causal} must be between 0 and the {query_len} query rows of "
                "that sequence."
            )
        used = -(-seq_len // block_size)
        if seq_len < 0 or (0 < seq_len < query_len) or used > block_table.shape[1]:
            raise ValueError(
                f"seq_lens[{seq}]={seq_len} must be 0, or between the {query_len} query rows of "
                f"that sequence and the {block_table.shape[1] * block_size} keys of block_table."
            )
        blocks = block_table[seq, :used]
        if used and not bool(((blocks >= 0) & (blocks < num_blocks)).all()):
            raise ValueError(
                f"block_table[{seq}]={blocks.tolist()} must hold blocks from 0 to {num_blocks - 1}."
            )
    if row_spans is not None:
        live = row_spans[: starts[-1]]
        if bool((live[:, 0] > live[:, 1]).any()):
            row = int((live[:, 0] > live[:, 1]).nonzero()[0])
            raise ValueError(
                f"row_spans[{row}]={live[row].tolist()} must be [start, end) with start <= end."
            )


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
