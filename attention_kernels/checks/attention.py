"""Check of attention, which may be twice as far from float64 as the reference is in its own
dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_kernels.canvas_attention import AttentionOptions, Window, canvas_attention
from attention_kernels.canvas_attention import Impl as AttentionImpl
from attention_kernels.checks.device import Checked
from attention_kernels.testing import CanvasBatch, assert_within_error_budget, make_canvas_batch

FP8 = torch.float8_e4m3fn
# Tokens before a canvas: keys in one piece, and cut into splits. Longer ones repeat the same loop.
CONTEXTS = (300, 3000)


@dataclass(frozen=True)
class AttentionShape:
    """Attention layers of a kind, and the sequences of a pass.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Head size.
        window: Keys next to a row; -1 without a window.
        rows: (query rows, leading causal rows) of each sequence.
        context: Keys of each sequence before its query rows.
        softcap: Cap of the scores; 0 without one.
        anchor: ``"canvas"`` or ``"query"``, see ``canvas_attention``.
        span: Length of the blocks in which causal rows attend in both directions; 0 for none.
        block_size: Positions of a cache block.
        dtype: Name of the query's dtype in torch.
        is_fp8: True for a cache in float8_e4m3fn.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    rows: tuple[tuple[int, int], ...] = ()
    context: int = 0
    softcap: float = 0.0
    anchor: str = "canvas"
    span: int = 0
    block_size: int = 16
    dtype: str = "bfloat16"
    is_fp8: bool = False

    def passes(self, canvas_length: int, max_model_len: int) -> Iterator[AttentionShape]:
        """Yield the passes that check these layers: a prompt's end with its canvas, a whole prompt,
        canvases alone, each behind a short context and a long one.

        Args:
            canvas_length: Tokens of a canvas.
            max_model_len: Longest sequence.
        """
        C = canvas_length
        longest = max(1, max_model_len - 2 * C)
        for rows in (((2 * C, C), (C, 0)), ((C + 5, C + 5), (C, 0)), ((C, 0), (C, 0))):
            for context in sorted({min(context, longest) for context in CONTEXTS}):
                yield replace(self, rows=rows, context=context)

    def batch(self, device: torch.device) -> CanvasBatch:
        """Random tensors of the shape."""
        spans = None
        if self.span:
            positions = [self.context + row for length, _ in self.rows for row in range(length)]
            starts = [position // self.span * self.span for position in positions]
            spans = [(start, start + self.span) for start in starts]
        return make_canvas_batch(
            [length for length, _ in self.rows],
            [self.context + length for length, _ in self.rows],
            [causal for _, causal in self.rows],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=getattr(torch, self.dtype),
            cache_dtype=FP8 if self.is_fp8 else None,
            padded_rows=3,
            row_spans=spans,
            device=str(device),
        )

    def options(self) -> AttentionOptions:
        """Options of the layers."""
        right = self.window if self.anchor == "query" else -1
        window = Window(self.window, right, "query" if self.anchor == "query" else "canvas")
        return AttentionOptions(self.head_dim**-0.5, self.softcap, window)


def check_attention(shape: AttentionShape, impl: AttentionImpl, device: torch.device) -> Checked:
    """Compare one pass of a layer with float64.

    Args:
        shape: The layer and the pass.
        impl: Implementation that is checked.
        device: Where it runs.

    Raises:
        AssertionError: If it is too far from float64.
        ValueError: If it does not take this shape.
        NotImplementedError: If it cannot run on this device.
    """
    batch, options = shape.batch(device), shape.options()
    # On the device, as serving has them.
    scales = _scales(device) if shape.is_fp8 else ()
    arguments = batch.arguments(options, scales=scales)
    got = canvas_attention(*arguments, impl=impl)
    same = canvas_attention(*arguments, impl="reference")
    key_factor, value_factor = (0.5, 2.0) if shape.is_fp8 else (1.0, 1.0)
    exact = replace(
        batch,
        query=batch.query.double(),
        key_cache=batch.key_cache.double() * key_factor,
        value_cache=batch.value_cache.double() * value_factor,
    )
    truth = canvas_attention(*exact.arguments(options), impl="reference")
    live = slice(batch.num_live_tokens)
    assert_within_error_budget(got[live], same[live], truth[live], "attention")
    difference = (got[live].double() - truth[live]).abs().max().item()
    return Checked(difference, lambda: canvas_attention(*arguments, out=got, impl=impl))


def _scales(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the scales of an FP8 cache's keys and values."""
    return torch.tensor(0.5, device=device), torch.tensor(2.0, device=device)
