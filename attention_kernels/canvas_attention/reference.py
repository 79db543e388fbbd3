"""The definition of correct: canvas attention in plain PyTorch, one sequence after the other.

Also what serves on a machine without a GPU, so it gathers only the keys in reach of a window,
never repeats key heads for grouped queries, and bounds its score matrix. Runs in fp64 for fp64
inputs and in fp32 for everything else.

Shapes: T tokens, Q query rows and L keys of one sequence, H query heads, N key heads, D head size.
"""

import torch
from torch import Tensor

# 64 MiB of fp32 scores: long prefills run in several chunks of rows instead of one large matrix.
MAX_SCORES = 2**24


def canvas_attention_reference(
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
    """Write the attention of every live row into ``out``; arguments as in ``api.py``.

    The launch bounds are not used: lengths are read here anyway, and nothing depends on the batch.
    """
    starts = query_start_loc.tolist()
    lens = seq_lens.tolist()
    causal = causal_rows.tolist()
    for seq, seq_len in enumerate(lens):
        rows = slice(starts[seq], starts[seq + 1])
        query_len = rows.stop - rows.start
        if query_len <= 0:
            continue
        chunk = _rows_per_chunk(query.shape[1], seq_len)
        for first in range(0, query_len, chunk):
            part = slice(first, min(first + chunk, query_len))
            _attend_rows(
                query[rows][part],
                key_cache,
                value_cache,
                block_table[seq],
                *_keys_seen(
                    part,
                    query_len,
                    seq_len,
                    causal[seq],
                    window_left=window_left,
                    window_right=window_right,
                    window_anchor=window_anchor,
                    row_spans=None if row_spans is None else row_spans[rows],
                    device=query.device,
                ),
                scale=scale,
                softcap=softcap,
                key_scale=key_scale,
                value_scale=value_scale,
                out=out[rows][part],
            )


def visibility_mask(
    query_len: int,
    seq_len: int,
    causal_rows: int,
    *,
    window_left: int = -1,
    window_right: int = -1,
    window_anchor: str = "canvas",
    row_spans: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which keys each query row of one sequence sees, bool ``[query_len, seq_len]``.

    Args:
        query_len: Query rows; they are the last of the ``seq_len`` keys.
        seq_len: Keys of the sequence.
        causal_rows: Leading query rows that attend causally; the rest is the canvas.
        window_left: Keys seen before the anchor, excluding it; -1 for all.
        window_right: Keys a canvas row sees after itself; -1 for all.
        window_anchor: ``"canvas"`` or ``"query"``: what the window of a canvas row is tied to.
        row_spans: [query_len, 2], key interval of the image that a row lies in.
        device: Where the mask is built.
    """
    lower, upper = row_bounds(
        query_len,
        seq_len,
        causal_rows,
        window_left=window_left,
        window_right=window_right,
        window_anchor=window_anchor,
        device=device,
    )
    spans = None if row_spans is None else causal_spans(row_spans, seq_len, causal_rows)
    return _visible(lower, upper, spans, 0, seq_len)


def row_bounds(
    query_len: int,
    seq_len: int,
    causal_rows: int,
    *,
    window_left: int,
    window_right: int,
    window_anchor: str,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """First key a row sees and one past its last, without image spans; both ``[query_len]``."""
    row = torch.arange(query_len, device=device)
    position = row + (seq_len - query_len)
    canvas_start = seq_len - query_len + causal_rows
    is_causal = row < causal_rows

    upper = torch.where(is_causal, position + 1, seq_len)
    if window_right >= 0:
        upper = torch.where(is_causal, upper, position + window_right + 1)
    if window_left < 0:
        lower = torch.zeros_like(position)
    elif window_anchor == "canvas":
        # A causal row lies before the canvas, so this leaves its own position as its anchor.
        lower = position.clamp(max=canvas_start) - window_left
    else:
        lower = position - window_left
    return lower.clamp(min=0), upper.clamp(min=0, max=seq_len)


def causal_spans(row_spans: Tensor, seq_len: int, causal_rows: int) -> Tensor:
    """The spans that count: bounded by the sequence, empty (0, 0) on canvas rows."""
    is_causal = torch.arange(row_spans.shape[0], device=row_spans.device) < causal_rows
    return row_spans.clamp(min=0, max=seq_len) * is_causal.unsqueeze(1)


def _rows_per_chunk(num_heads: int, num_keys: int) -> int:
    return max(1, MAX_SCORES // (num_heads * max(num_keys, 1)))


def _visible(lower: Tensor, upper: Tensor, spans: Tensor | None, first: int, last: int) -> Tensor:
    """Bool ``[rows, last - first]``: which of the keys ``first:last`` each row sees."""
    key = torch.arange(first, last, device=lower.device)
    visible = (key >= lower.unsqueeze(1)) & (key < upper.unsqueeze(1))
    if spans is not None:
        visible |= (key >= spans[:, :1]) & (key < spans[:, 1:])
    return visible


def _key_reach(lower: Tensor, upper: Tensor, spans: Tensor | None) -> tuple[int, int]:
    """The smallest key interval that holds everything these rows see."""
    first, last = int(lower.min()), int(upper.max())
    if spans is not None:
        start, end = spans.unbind(1)
        inside = start < end
        if bool(inside.any()):
            first = min(first, int(start[inside].min()))
            last = max(last, int(end[inside].max()))
    return first, last


def _keys_seen(
    part: slice,
    query_len: int,
    seq_len: int,
    causal_rows: int,
    *,
    window_left: int,
    window_right: int,
    window_anchor: str,
    row_spans: Tensor | None,
    device: torch.device,
) -> tuple[int, int, Tensor | None]:
    """What some rows of a sequence see: the interval of its keys, and which of them no row does.

    Returns:
        The first key, one past the last, and bool ``[rows, keys]``, true where a row does not see a
        key of the interval; ``None`` if all rows see all of it.
    """
    if causal_rows == 0 and window_right < 0 and (window_left < 0 or window_anchor == "canvas"):
        # A canvas on its own, the usual step: known without a tensor.
        first = 0 if window_left < 0 else max(seq_len - query_len - window_left, 0)
        return first, seq_len, None
    lower, upper = row_bounds(
        query_len,
        seq_len,
        causal_rows,
        window_left=window_left,
        window_right=window_right,
        window_anchor=window_anchor,
        device=device,
    )
    lower, upper, spans = lower[part], upper[part], None
    if row_spans is not None:
        spans = causal_spans(row_spans, seq_len, causal_rows)[part]
    first, last = _key_reach(lower, upper, spans)
    return first, last, ~_visible(lower, upper, spans, first, last)


def _gather(
    cache: Tensor,
    blocks: Tensor,
    first: int,
    last: int,
    cache_scale: float | Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Keys or values ``first:last`` of one sequence in its logical order, ``[N, keys, D]``."""
    block_size = cache.shape[1]
    first_block = first // block_size
    used = blocks[first_block : (last - 1) // block_size + 1]
    offset = first - first_block * block_size
    rows = cache[used].flatten(0, 1)[offset : offset + last - first].to(dtype)
    if cache_scale is not None:
        rows = rows * cache_scale
    return rows.transpose(0, 1)


def _attend_rows(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor,
    first: int,
    last: int,
    hidden: Tensor | None,
    *,
    scale: float,
    softcap: float,
    key_scale: float | Tensor | None,
    value_scale: float | Tensor | None,
    out: Tensor,
) -> None:
    """Attention of some rows ``[Q, H, D]`` of one sequence, written to ``out``; see _keys_seen."""
    if first >= last:
        out.zero_()
        return
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    key = _gather(key_cache, blocks, first, last, key_scale, dtype)
    value = _gather(value_cache, blocks, first, last, value_scale, dtype)

    # The heads of a group and its rows share one matrix product with their key head. The product
    # with `scale` also moves the rows to fresh memory, so that their place in a batch cannot
    # change how a matrix product is tiled.
    scaled = (query.to(dtype) * scale).reshape(num_rows, num_kv_heads, -1, head_dim)
    grouped = scaled.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)  # [N, G * Q, D]
    scores = grouped @ key.transpose(1, 2)  # [N, G * Q, keys]
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(num_kv_heads, -1, num_rows, last - first)
    if hidden is None:
        weights = scores.softmax(-1)
    else:
        # Filled again after the softmax: a row that sees nothing is zero there and not NaN.
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(hidden, 0.0)
    result = weights.flatten(1, 2) @ value  # [N, G * Q, D]
    result = result.view(num_kv_heads, -1, num_rows, head_dim).permute(2, 0, 1, 3)
    out.copy_(result.reshape(num_rows, num_heads, head_dim))
