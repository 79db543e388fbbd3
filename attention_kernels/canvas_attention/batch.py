"""Arguments of attention: the sequences of a pass on a paged cache, and the options of a layer.

Each is made and checked once, and passed whole to the implementation that runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from attention_kernels.canvas_attention.splits import MAX_SPLITS

WindowAnchor = Literal["canvas", "query"]

FP8 = torch.float8_e4m3fn
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class PagedCache(NamedTuple):
    """Keys and values in blocks.

    Attributes:
        key: [num_blocks, block_size, num_kv_heads, head_dim] in the dtype of the query or
            float8_e4m3fn; any strides with the last dim contiguous, so a view of a cache that
            interleaves keys and values, or heads and positions, needs no copy.
        value: Values, like ``key``.
        key_scale: Factor of FP8 keys: a number, or one fp32 number on the device; ``None`` for
            other caches.
        value_scale: Factor of FP8 values, like ``key_scale``.
    """

    key: Tensor
    value: Tensor
    key_scale: float | Tensor | None = None
    value_scale: float | Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        """True if the cache is quantised."""
        return self.key.dtype == FP8

    def check(self, query: Tensor) -> None:
        """Refuse a cache that does not fit a query.

        Raises:
            ValueError: Naming what disagrees.
        """
        if self.key.dim() != 4:
            raise ValueError(
                f"key_cache has shape {_shape(self.key)}; it must be "
                "[num_blocks, block_size, num_kv_heads, head_dim]."
            )
        if self.value.shape != self.key.shape or self.value.dtype != self.key.dtype:
            raise ValueError(
                f"value_cache is {self.value.dtype} {_shape(self.value)}; it must be like key_cache, "
                f"{self.key.dtype} {_shape(self.key)}."
            )
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = self.key.shape[2]
        if self.key.shape[3] != head_dim:
            raise ValueError(
                f"key_cache has head_dim {self.key.shape[3]}; it must be that of query, {head_dim}."
            )
        if num_kv_heads == 0 or num_heads % num_kv_heads:
            raise ValueError(
                f"query has {num_heads} heads; they must be a multiple of the {num_kv_heads} heads "
                "of key_cache."
            )
        if self.key.dtype not in (query.dtype, FP8):
            raise ValueError(
                f"key_cache has dtype {self.key.dtype}; allowed are that of query, {query.dtype}, "
                f"and {FP8}. View an FP8 cache that is stored as bytes as {FP8} first."
            )
        _check_strides("key_cache", self.key, query.device)
        _check_strides("value_cache", self.value, query.device)
        for name, scale in (("key_scale", self.key_scale), ("value_scale", self.value_scale)):
            self._check_scale(name, scale, query.device)

    def _check_scale(self, name: str, scale: float | Tensor | None, device: torch.device) -> None:
        if not self.is_fp8:
            if scale is not None:
                raise ValueError(
                    f"{name} is given but key_cache has dtype {self.key.dtype}; scales belong to a "
                    f"{FP8} cache. Leave {name} out."
                )
            return
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


@dataclass(frozen=True)
class Sequences:
    """The sequences of a pass, whose last rows are queries.

    Attributes:
        block_table: [num_seqs, max_blocks], int32. Entries beyond a sequence's keys are not read.
        query_start_loc: [num_seqs + 1], int32: first row of each sequence. Rows from the last entry
            on are padding.
        seq_lens: [num_seqs], int32: keys of each sequence, its query rows included.
        causal_rows: [num_seqs], int32: leading query rows that attend causally, 0 to Q.
        row_spans: [num_tokens, 2], int32: half-open key interval of the image that a row lies in
            (it holds the row's own position), start == end if there is none. Only spans of causal
            rows count; ``None`` without images.
        max_query_len: At least the longest query of the batch, if the caller knows it on the host;
            sizes a launch, and a result may be rounded in another order. ``None`` for what the
            shapes allow.
        max_seq_len: At least the most keys of a sequence, like ``max_query_len``.
    """

    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    causal_rows: Tensor
    row_spans: Tensor | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None

    @property
    def query_bound(self) -> int:
        """``max_query_len`` of sequences that are :meth:`bounded`."""
        assert self.max_query_len is not None
        return self.max_query_len

    @property
    def key_bound(self) -> int:
        """``max_seq_len`` of sequences that are :meth:`bounded`."""
        assert self.max_seq_len is not None
        return self.max_seq_len

    def bounded(self, query: Tensor, cache: PagedCache) -> Sequences:
        """Return the sequences with every bound set.

        Args:
            query: [num_tokens, num_q_heads, head_dim].
            cache: Cache that holds their keys and values.

        Raises:
            ValueError: If shapes, dtypes, devices or bounds disagree.
        """
        self._check(query)
        most = self.block_table.shape[1] * cache.key.shape[1]
        return replace(
            self,
            max_query_len=_bound("max_query_len", self.max_query_len, query.shape[0]),
            max_seq_len=_bound("max_seq_len", self.max_seq_len, most),
        )

    def _check(self, query: Tensor) -> None:
        if self.row_spans is not None:
            _check_int32("row_spans", self.row_spans, (query.shape[0], 2), query.device)
        if self.seq_lens.dim() != 1:
            raise ValueError(f"seq_lens has shape {_shape(self.seq_lens)}; it must be [num_seqs].")
        num_seqs = self.seq_lens.shape[0]
        _check_int32("seq_lens", self.seq_lens, (num_seqs,), query.device)
        _check_int32("causal_rows", self.causal_rows, (num_seqs,), query.device)
        _check_int32("query_start_loc", self.query_start_loc, (num_seqs + 1,), query.device)
        if self.block_table.dim() != 2:
            raise ValueError(
                f"block_table has shape {_shape(self.block_table)}; it must be "
                "[num_seqs, max_blocks]."
            )
        shape = (num_seqs, self.block_table.shape[1])
        _check_int32("block_table", self.block_table, shape, query.device)


@dataclass(frozen=True)
class Window:
    """Window of keys that a row sees around its anchor.

    Attributes:
        left: Keys before the anchor, excluding it; -1 for all. A model's ``sliding_window`` W is
            ``W - 1``.
        right: Keys that a canvas row sees after itself, only with ``anchor="query"``; -1 for all.
        anchor: Anchor of a canvas row's window: ``"canvas"``, the first position of its canvas, so
            that all its rows see the same keys, or ``"query"``, the row itself.

    Raises:
        ValueError: If they disagree.
    """

    left: int = -1
    right: int = -1
    anchor: WindowAnchor = "canvas"

    def __post_init__(self) -> None:
        if self.anchor not in get_args(WindowAnchor):
            raise ValueError(
                f"window_anchor={self.anchor!r} is not one of {', '.join(get_args(WindowAnchor))}."
            )
        for name, size in (("window_left", self.left), ("window_right", self.right)):
            if size < -1:
                raise ValueError(
                    f"{name}={size} must be -1 (no window) or the number of keys on that side, >= 0."
                )
        if self.anchor == "canvas" and self.right != -1:
            raise ValueError(
                f"window_right={self.right} has no meaning with window_anchor='canvas', where every "
                "canvas row sees up to the last key; set window_right to -1 or window_anchor to "
                "'query'."
            )


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a layer.

    Attributes:
        scale: Factor of the scores.
        softcap: Bound of the scores, ``softcap * tanh(score / softcap)``; 0 is off.
        window: Window of keys that a row sees.
        most_splits: Most pieces that a sequence's keys are cut into where a batch does not fill a
            GPU. With 1 the output of a sequence has the same bits in every batch.

    Raises:
        ValueError: If ``softcap`` is negative or ``most_splits`` below 1.
    """

    scale: float
    softcap: float = 0.0
    window: Window = Window()
    most_splits: int = MAX_SPLITS

    def __post_init__(self) -> None:
        if not self.softcap >= 0:
            raise ValueError(f"softcap={self.softcap} must be 0 (off) or positive.")
        if self.most_splits < 1:
            raise ValueError(f"most_splits={self.most_splits} must be at least 1.")


def check_query(query: Tensor, out: Tensor | None) -> None:
    """Refuse a query, or an output for it, of another form.

    Raises:
        ValueError: Naming what disagrees.
    """
    if query.dim() != 3:
        raise ValueError(
            f"query has shape {_shape(query)}; it must be [num_tokens, num_q_heads, head_dim]."
        )
    if query.dtype not in QUERY_DTYPES:
        raise ValueError(
            f"query has dtype {query.dtype}; allowed are {', '.join(map(str, QUERY_DTYPES))}."
        )
    _check_strides("query", query, query.device)
    if out is None:
        return
    if out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(
            f"out is {out.dtype} {_shape(out)}; it must be like query, "
            f"{query.dtype} {_shape(query)}."
        )
    _check_strides("out", out, query.device)


def _bound(name: str, given: int | None, most: int) -> int:
    """A bound that the caller gives, or what the shapes allow."""
    if given is None:
        return most
    if given < 0:
        raise ValueError(f"{name}={given} must be at least 0, or left out.")
    return given


def _check_int32(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be torch.int32.")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {_shape(tensor)}; it must be {list(shape)}.")
    _check_strides(name, tensor, device)


def _check_strides(name: str, tensor: Tensor, device: torch.device) -> None:
    _check_device(name, tensor, device)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be 1."
        )


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on the query's {device}.")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
