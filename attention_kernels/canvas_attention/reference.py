"""The definition of correct: canvas attention in plain PyTorch, one sequence after the other.

Also what serves on a machine without a GPU, so it gathers only the keys in reach of a window,
never repeats key heads for grouped queries, and bounds its score matrix. Runs in fp64 for fp64
inputs and in fp32 for everything else.

Shapes: T tokens, Q query rows and L keys of one sequence, H query heads, N key heads, D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.canvas_attention.batch import (
    AttentionOptions,
    PagedCache,
    Sequences,
    Window,
)

# 64 MiB of fp32 scores: long prefills run in several chunks of rows instead of one large matrix.
MAX_SCORES = 2**24


def canvas_attention_reference(
    query: Tensor,
    cache: PagedCache,
    sequences: Sequences,
    options: AttentionOptions,
    out: Tensor,
) -> None:
    """Write the attention of every live row into ``out``; arguments as in ``api.py``.

    The launch bounds are not used: lengths are read here anyway, and nothing depends on the batch.
    """
    starts = sequences.query_start_loc.tolist()
    lens = sequences.seq_lens.tolist()
    causal = sequences.causal_rows.tolist()
    for seq, seq_len in enumerate(lens):
        rows = slice(starts[seq], starts[seq + 1])
        query_len = rows.stop - rows.start
        if query_len <= 0:
            continue
        spans = None if sequences.row_spans is None else sequences.row_spans[rows]
        one = _Sequence(query_len, seq_len, causal[seq], spans, sequences.block_table[seq])
        chunk = _rows_per_chunk(query.shape[1], seq_len)
        for first in range(0, query_len, chunk):
            part = slice(first, min(first + chunk, query_len))
            _attend_rows(
                query[rows][part], cache, one.keys_seen(part, options), options, out[rows][part]
            )


def row_bounds(
    query_len: int,
    seq_len: int,
    causal_rows: int,
    window: Window,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """First key a row sees and one past its last, without image spans; both ``[query_len]``."""
    row = torch.arange(query_len, device=device)
    position = row + (seq_len - query_len)
    canvas_start = seq_len - query_len + causal_rows
    is_causal = row < causal_rows

    upper = torch.where(is_causal, position + 1, seq_len)
    if window.right >= 0:
        upper = torch.where(is_causal, upper, position + window.right + 1)
    if window.left < 0:
        lower = torch.zeros_like(position)
    elif window.anchor == "canvas":
        # A causal row lies before the canvas, so this leaves its own position as its anchor.
        lower = position.clamp(max=canvas_start) - window.left
    else:
        lower = position - window.left
    return lower.clamp(min=0), upper.clamp(min=0, max=seq_len)


def causal_spans(row_spans: Tensor, seq_len: int, causal_rows: int) -> Tensor:
    """Return the spans that count: bounded by the sequence, empty (0, 0) on canvas rows."""
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
    """Return the smallest key interval that holds everything these rows see."""
    first, last = int(lower.min()), int(upper.max())
    if spans is not None:
        start, end = spans.unbind(1)
        inside = start < end
        if bool(inside.any()):
            first = min(first, int(start[inside].min()))
            last = max(last, int(end[inside].max()))
    return first, last


class _KeysSeen(NamedTuple):
    """Keys that some rows of a sequence see.

    Attributes:
        first: The first of them.
        last: One past the last.
        hidden: Bool ``[rows, last - first]``, true where a row does not see a key of the interval;
            ``None`` if all rows see all of it.
        blocks: [max_blocks], int32, the sequence's blocks of the cache.
    """

    first: int
    last: int
    hidden: Tensor | None
    blocks: Tensor


class _Sequence(NamedTuple):
    """One sequence of a batch; see :class:`Sequences`."""

    query_len: int
    seq_len: int
    causal_rows: int
    row_spans: Tensor | None
    blocks: Tensor

    def keys_seen(self, part: slice, options: AttentionOptions) -> _KeysSeen:
        """Return the interval of keys that some of the sequence's rows see."""
        window = options.window
        if (
            self.causal_rows == 0
            and window.right < 0
            and (window.left < 0 or window.anchor == "canvas")
        ):
            # A canvas on its own, the usual step: known without a tensor.
            first = 0 if window.left < 0 else max(self.seq_len - self.query_len - window.left, 0)
            return _KeysSeen(first, self.seq_len, None, self.blocks)
        lower, upper = row_bounds(
            self.query_len, self.seq_len, self.causal_rows, window, self.blocks.device
        )
        lower, upper, spans = lower[part], upper[part], None
        if self.row_spans is not None:
            spans = causal_spans(self.row_spans, self.seq_len, self.causal_rows)[part]
        first, last = _key_reach(lower, upper, spans)
        return _KeysSeen(first, last, ~_visible(lower, upper, spans, first, last), self.blocks)


def _gather(
    cache: Tensor, seen: _KeysSeen, cache_scale: float | Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Keys or values of one sequence that are seen, in its logical order, ``[N, keys, D]``."""
    block_size = cache.shape[1]
    first_block = seen.first // block_size
    used = seen.blocks[first_block : (seen.last - 1) // block_size + 1]
    offset = seen.first - first_block * block_size
    rows = cache[used].flatten(0, 1)[offset : offset + seen.last - seen.first].to(dtype)
    if cache_scale is not None:
        rows = rows * cache_scale
    return rows.transpose(0, 1)


def _attend_rows(
    query: Tensor, cache: PagedCache, seen: _KeysSeen, options: AttentionOptions, out: Tensor
) -> None:
    """Attention of some rows ``[Q, H, D]`` of one sequence, written to ``out``."""
    if seen.first >= seen.last:
        out.zero_()
        return
    scale, softcap, hidden = options.scale, options.softcap, seen.hidden
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = cache.key.shape[2]
    key = _gather(cache.key, seen, cache.key_scale, dtype)
    value = _gather(cache.value, seen, cache.value_scale, dtype)

    # The heads of a group and its rows share one matrix product with their key head. The product
    # with `scale` also moves the rows to fresh memory, so that their place in a batch cannot
    # change how a matrix product is tiled.
    scaled = (query.to(dtype) * scale).reshape(num_rows, num_kv_heads, -1, head_dim)
    grouped = scaled.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)  # [N, G * Q, D]
    scores = grouped @ key.transpose(1, 2)  # [N, G * Q, keys]
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(num_kv_heads, -1, num_rows, seen.last - seen.first)
    if hidden is None:
        weights = scores.softmax(-1)
    else:
        # Filled again after the softmax: a row that sees nothing is zero there and not NaN.
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(hidden, 0.0)
    result = weights.flatten(1, 2) @ value  # [N, G * Q, D]
    result = result.view(num_kv_heads, -1, num_rows, head_dim).permute(2, 0, 1, 3)
    out.copy_(result.reshape(num_rows, num_heads, head_dim))
