"""Base of both kernels: FlashAttention-4's bookkeeping of a sequence with the canvas mask.

FlashAttention-4 keeps the facts about a sequence, the key tiles that a query tile visits, and the
mask of a tile of scores in three small objects that every group of warps builds for itself. Its
kernel classes hand these to one method per kind of warp. ``CanvasKernel`` overrides those methods
to exchange the objects for ours on the way in; no kernel code is copied or changed.

Device integers of the DSL take part in plain arithmetic here and in nothing else: a comparison or
a Python ``min`` would ask for a value that is not known while a kernel is traced.
"""

from collections.abc import Callable
from dataclasses import fields, make_dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute

from attention_kernels.canvas_attention.cute.visibility import Visibility


class CanvasTileRange:
    """Range of key tiles that a query tile visits; it overrides the answers of a ``BlockInfo``."""

    tile_m: int
    tile_n: int
    qhead_per_kvhead_packgqa: int
    is_split_kv: bool
    window_size_left: Any
    window_size_right: Any
    canvas_anchor: bool

    def get_n_block_min_max(
        self, seqlen_info: Any, m_block: Any, split_idx: Any = 0, num_splits: Any = 1
    ) -> tuple[Any, Any]:
        """Return the half-open range of key tiles, which the kernels walk from its end."""
        seen = visibility(self, seqlen_info)
        if not self.is_split_kv:
            return seen.visited(m_block, *self._cut())
        return seen.visited_in_split(m_block, *self._cut(), split_idx, num_splits)

    def get_n_block_min_causal_local_mask(
        self, seqlen_info: Any, m_block: Any, n_block_min: Any
    ) -> Any:
        """Return the tile at which masking stops: below it every row sees to the end of a tile."""
        cut = visibility(self, seqlen_info).first_cut_right(m_block, *self._cut())
        return cutlass.max(n_block_min, cut)

    def get_n_block_min_before_local_mask(
        self, seqlen_info: Any, m_block: Any, n_block_min: Any
    ) -> Any:
        """Return the tile at which masking resumes: below it some row does not see a tile's
        start.
        """
        whole = visibility(self, seqlen_info).first_whole_left(m_block, *self._cut())
        return cutlass.max(n_block_min, whole)

    def _cut(self) -> tuple[int, int, int]:
        return self.tile_m, self.tile_n, self.qhead_per_kvhead_packgqa


def visibility(windows: Any, seqlen_info: Any) -> Visibility:
    """The keys that a sequence's rows see; ``windows`` is a ``CanvasTileRange`` or a mask."""
    return Visibility(
        seqlen_info.seqlen_q,
        seqlen_info.seqlen_k,
        seqlen_info.causal_rows,
        windows.window_size_left,
        windows.window_size_right,
        windows.canvas_anchor,
        cutlass.min,
        cutlass.max,
    )


class Bookkeeping:
    """FlashAttention-4's three objects and what takes their place; each extends its own."""

    def __init__(
        self, block_info: type, sequence: type, mask: type, canvas_mask: Callable[..., Any]
    ) -> None:
        """Extend the classes of one copy of FlashAttention-4; its masks differ by GPU and come
        extended.
        """
        self.block_info, self.sequence, self.mask = block_info, sequence, mask
        self.canvas_mask = canvas_mask
        anchor = [("canvas_anchor", bool, True)]
        extend = partial(make_dataclass, frozen=True)
        self.canvas_block_info: Callable[..., Any] = extend(
            "CanvasBlockInfo", anchor, bases=(CanvasTileRange, block_info)
        )
        self.canvas_sequence: Callable[..., Any] = extend(
            "CanvasSequence", [("causal_rows", Any, 0)], bases=(sequence,)
        )

    def exchange(self, value: Any, canvas_anchor: bool) -> Any:
        """An argument of a kernel method; anything but the three objects is left alone."""
        if isinstance(value, self.block_info):
            return self.canvas_block_info(**_values(value), canvas_anchor=canvas_anchor)
        if isinstance(value, partial):
            # The other two arrive as what builds them.
            if value.func is self.sequence.create:  # type: ignore[attr-defined]
                return partial(self.canvas_sequence_of, value)
            if value.func is self.mask:
                known = {**value.keywords, "canvas_anchor": canvas_anchor}
                return partial(self.canvas_mask, *value.args, **known)
        return value

    def canvas_sequence_of(self, create: Callable[..., Any], batch_idx: Any) -> Any:
        """Make the facts about a sequence from FlashAttention-4's constructor."""
        numbers = create.keywords["mSeqUsedK"]  # type: ignore[attr-defined]  # [2, num_seqs]
        known = create(batch_idx, mSeqUsedK=numbers[0, None])
        return self.canvas_sequence(**_values(known), causal_rows=numbers[1, batch_idx])


def _values(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


class CanvasKernel:
    """The methods of a FlashAttention-4 kernel class through which the bookkeeping passes."""

    bookkeeping: Bookkeeping
    canvas_anchor: bool
    launch_stock: Callable[..., None]

    def exchanged(self, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one of these methods, with our bookkeeping in them."""
        exchange = partial(self.bookkeeping.exchange, canvas_anchor=self.canvas_anchor)
        return [exchange(arg) for arg in args], {k: exchange(arg) for k, arg in kwargs.items()}

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key_cache: cute.Tensor,
        value_cache: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        scale: cutlass.Float32,
        query_start_loc: cute.Tensor,
        sequences: cute.Tensor,
        block_table: cute.Tensor,
        window_left: cutlass.Int32 | None,
        window_right: cutlass.Int32 | None,
        stream: Any,
    ) -> None:
        """Launch for a batch; ``sequences`` is [2, num_seqs]: key counts over causal rows.

        Of a kernel with splits ``out`` is [num_splits, num_tokens, num_q_heads, head_dim], fp32,
        and ``lse`` [num_splits, num_q_heads, num_tokens], fp32; of others there is no ``lse``.
        """
        self.launch_stock(
            query,
            key_cache,
            value_cache,
            out,
            lse,
            scale,
            mCuSeqlensQ=query_start_loc,
            mSeqUsedK=sequences,
            mPageTable=block_table,
            window_size_left=window_left,
            window_size_right=window_right,
            stream=stream,
        )


def through_canvas(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The override of one method: the stock method, called with our bookkeeping."""

    def method(self: CanvasKernel, *args: Any, **kwargs: Any) -> Any:
        args_with, kwargs_with = self.exchanged(args, kwargs)
        return stock(self, *args_with, **kwargs_with)

    return method
