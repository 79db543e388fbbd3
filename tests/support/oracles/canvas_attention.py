"""The definition of canvas_attention, term by term in fp64, and its kernels in small pieces."""

import contextlib
import functools
from unittest import mock

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from attention_kernels.canvas_attention import (
    AttentionOptions,
    PagedCache,
    Sequences,
    Window,
    canvas_attention,
)
from attention_kernels.testing import CanvasBatch, make_canvas_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
make_batch = functools.partial(make_canvas_batch, device=DEVICE)

SWEEP = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

# "triton-tiny" cuts small inputs into many tiles, several splits and parts of values.
IMPLS = ["reference", "triton", "triton-tiny"]


def sees(p, j, *, seq_len, canvas_start, window_left, window_right, anchor, span):
    """Return whether one query position sees one key, term by term."""
    if not 0 <= j <= seq_len - 1:
        return False
    if p < canvas_start:
        in_window = j <= p and (window_left < 0 or j >= p - window_left)
        return in_window or span[0] <= j < span[1]
    if anchor == "canvas":
        return window_left < 0 or j >= canvas_start - window_left
    return (window_left < 0 or j >= p - window_left) and (window_right < 0 or j <= p + window_right)


def expected(
    batch: CanvasBatch,
    dtype: torch.dtype,
    *,
    scale,
    softcap=0.0,
    left=-1,
    right=-1,
    anchor="canvas",
    key_scale=1.0,
    value_scale=1.0,
) -> Tensor:
    """Compute attention of the live rows in ``dtype``, by sequence and mask element."""
    batch = CanvasBatch(**{k: t if t is None else t.cpu() for k, t in batch.tensors().items()})
    out = torch.zeros(batch.num_live_tokens, *batch.query.shape[1:], dtype=dtype)
    block_size = batch.key_cache.shape[1]
    groups = batch.query.shape[1] // batch.key_cache.shape[2]
    starts = batch.query_start_loc.tolist()
    for seq, (seq_len, causal) in enumerate(
        zip(batch.seq_lens.tolist(), batch.causal_rows.tolist(), strict=True)
    ):
        query_len = starts[seq + 1] - starts[seq]
        if query_len == 0 or seq_len == 0:
            continue
        slots = [
            (int(batch.block_table[seq, j // block_size]), j % block_size) for j in range(seq_len)
        ]
        key = torch.stack([batch.key_cache[slot].to(dtype) for slot in slots]) * key_scale
        value = torch.stack([batch.value_cache[slot].to(dtype) for slot in slots]) * value_scale
        first = seq_len - query_len
        mask = torch.tensor(
            [
                [
                    sees(
                        first + r,
                        j,
                        seq_len=seq_len,
                        canvas_start=first + causal,
                        window_left=left,
                        window_right=right,
                        anchor=anchor,
                        span=(0, 0)
                        if batch.row_spans is None
                        else batch.row_spans[starts[seq] + r].tolist(),
                    )
                    for j in range(seq_len)
                ]
                for r in range(query_len)
            ]
        )
        rows = slice(starts[seq], starts[seq + 1])
        q = batch.query[rows].to(dtype).transpose(0, 1)
        k = key.repeat_interleave(groups, 1).transpose(0, 1)
        v = value.repeat_interleave(groups, 1).transpose(0, 1)
        if softcap == 0:
            heads = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=scale
            )[0]
        else:
            scores = softcap * torch.tanh(q @ k.transpose(1, 2) * scale / softcap)
            heads = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        out[rows] = heads.transpose(0, 1)
    return out.to(DEVICE)


def nan_scratch(size, device):
    return torch.full((size,), float("nan"), dtype=torch.float32, device=device)


def three_at_most(programs, at_once, keys, partial_bytes, most):
    return min(3, most)


@contextlib.contextmanager
def configured(impl: str):
    """Use the kernels of an entry of IMPLS, with NaN as scratch; yield the name in the API."""
    if impl == "reference":
        yield impl
        return
    from attention_kernels.canvas_attention.triton import launch as kernels

    tiny = {}
    if impl == "triton-tiny":
        config = kernels.TritonConfig(16, 16, 4, 1, parts=2)
        tiny = {"choose_config": mock.Mock(return_value=config), "splits": three_at_most}
        tiny |= {"MIN_SPLIT_KEYS": 32, "SEARCH_WIDTH": 2}
    with mock.patch.multiple(kernels, _scratch=nan_scratch, **tiny):
        yield "triton"


def arguments_of(
    query,
    key_cache,
    value_cache,
    *,
    key_scale=None,
    value_scale=None,
    scale=1.0,
    softcap=0.0,
    left=-1,
    right=-1,
    anchor="canvas",
    most_splits=8,
    **sequences,
) -> tuple[Tensor, PagedCache, Sequences, AttentionOptions]:
    """Return the arguments of canvas_attention, from tensors and numbers by name."""
    return (
        query,
        PagedCache(key_cache, value_cache, key_scale, value_scale),
        Sequences(**sequences),
        AttentionOptions(scale, softcap, Window(left, right, anchor), most_splits),
    )


def attend(*, out=None, impl="auto", **named) -> Tensor:
    """Call canvas_attention with tensors and numbers by name."""
    query, cache, sequences, options = arguments_of(**named)
    return canvas_attention(query, cache, sequences, options, out=out, impl=impl)


def run(batch: CanvasBatch, *, impl, **named) -> Tensor:
    with configured(impl) as name:
        return attend(**batch.tensors(), impl=name, **named)
