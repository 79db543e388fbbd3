"""The public functions: check the arguments, choose an implementation, call it."""

import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from attention_kernels.canvas_attention.batch import (
    AttentionOptions,
    PagedCache,
    Sequences,
    check_query,
)
from attention_kernels.canvas_attention.reference import canvas_attention_reference

Impl = Literal["auto", "reference", "triton", "cute"]
Attend = Callable[[Tensor, PagedCache, Sequences, AttentionOptions, Tensor], None]

logger = logging.getLogger(__name__)


def canvas_attention(
    query: Tensor,
    cache: PagedCache,
    sequences: Sequences,
    options: AttentionOptions,
    *,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Paged attention of sequences that begin with causal rows and end with a canvas: a plan that
    runs at once.

    Of a sequence with L keys the last Q are queries: row r stands at position p = L - Q + r. With
    c = ``causal_rows`` of the sequence and its canvas starting at s = L - Q + c, key j is seen by

    - a causal row (r < c) if ``p - left <= j <= p``, or if j is in the row's image span;
    - a canvas row (r >= c) if ``s - left <= j < L`` with the window's ``anchor="canvas"``, or
      ``p - left <= j <= p + right`` (and j < L) with ``anchor="query"``.

    A window of -1 leaves that side open. A row that sees nothing gives zeros. The new keys and
    values must be in the cache before the call.

    Args:
        query: [num_tokens, num_q_heads, head_dim], bf16, fp16, fp32, or fp64 (reference only);
            last dim contiguous. Padding rows are never read.
        cache: Keys and values.
        sequences: Rows and keys of each sequence.
        options: Scale, softcap and window.
        out: [num_tokens, num_q_heads, head_dim] like ``query``; written in place. Padding rows
            are left as they are; without ``out`` they are zero.
        impl: ``"auto"``, ``"reference"``, ``"triton"`` or ``"cute"``. Only ``"auto"`` chooses,
            and never ``"cute"``: that extends FlashAttention-4 for compute capability 9.x
            (head_dim 256 and 512) and 10.x (256), compiles for both, and has run on neither. It
            takes bf16 and fp16 without ``row_spans``.

    Returns:
        ``out``, or a new tensor like it. Softmax runs in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: If shapes, dtypes, devices or options disagree.
        NotImplementedError: If ``impl`` cannot run these inputs.
    """
    run = plan_canvas_attention(query, cache, sequences, options, out=out, impl=impl)
    if out is None:
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    if query.numel() > 0 and sequences.seq_lens.numel() > 0:
        run(query, cache, out)
    return out


class Planned(Protocol):
    """One layer's attention in a step that was planned."""

    def __call__(self, query: Tensor, cache: PagedCache, out: Tensor) -> None:
        """Write the attention of the step's rows into ``out``; rows after them are padding.

        Nothing is checked: the tensors are like those of the plan, and scales are tensors.
        """


def plan_canvas_attention(
    query: Tensor,
    cache: PagedCache,
    sequences: Sequences,
    options: AttentionOptions,
    *,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Planned:
    """Check once what the layers of a kind share in a step, and keep the result.

    Arguments are those of :func:`canvas_attention` for one layer. Nothing is computed on the
    device, and none of its memory is held except the tensors of the batch. Their values are read
    when a layer runs: the plan may be older than a graph that is captured with it.

    Returns:
        A plan that runs each layer with tensors of these shapes, dtypes and devices.

    Raises:
        ValueError: If shapes, dtypes, devices or options disagree.
        NotImplementedError: If ``impl`` cannot run these inputs.
    """
    chosen = _checked(query, cache, out, impl)
    sequences = sequences.bounded(query, cache)
    attend: Attend = canvas_attention_reference
    if chosen != "reference":
        kernels = _kernels(chosen)
        if chosen == "triton":
            kernels.check_inputs(query)
            planned: Planned = kernels.CanvasLaunch(query, cache, sequences, options)
            return planned
        attend = kernels.attend
    num_tokens = query.shape[0]

    def run(query: Tensor, cache: PagedCache, out: Tensor) -> None:
        attend(query[:num_tokens], cache, sequences, options, out[:num_tokens])

    return run


def warm_up_canvas_attention(
    query: Tensor,
    cache: PagedCache,
    options: AttentionOptions,
    *,
    with_spans: Iterable[bool] = (False,),
    impl: Impl = "auto",
) -> None:
    """Compile every kernel that layers of a kind may launch, whatever the rows of a step.

    Arguments are those of :func:`plan_canvas_attention`, and ``with_spans``: whether steps have
    ``row_spans``, or both where some do. No value of the tensors is read.
    """
    chosen = _checked(query, cache, None, impl)
    if chosen == "reference":
        return

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=query.device)

    kernels, out = _kernels(chosen), torch.empty_like(query)
    for spans in with_spans:
        row_spans = zeros(query.shape[0], 2) if spans else None
        # One sequence, without rows.
        empty = Sequences(zeros(1, 1), zeros(2), zeros(1), zeros(1), row_spans)
        for num_splits in range(1, min(2, options.most_splits) + 1):
            bounded = empty.bounded(query, cache)
            kernels.attend(query, cache, bounded, options, out, num_splits=num_splits)


def _checked(query: Tensor, cache: PagedCache, out: Tensor | None, impl: Impl) -> Impl:
    """Check the tensors of a layer, and return the implementation that runs them."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} is not one of {', '.join(get_args(Impl))}.")
    check_query(query, out)
    cache.check(query)
    return _choose(query) if impl == "auto" else impl


def _kernels(impl: str) -> Any:
    """Return the module of an implementation in kernels, imported only when it is used.

    What FlashAttention-4 needs is imported later, when a kernel is compiled for a GPU that can run
    it.
    """
    try:
        return importlib.import_module(f"attention_kernels.canvas_attention.{impl}.launch")
    except ImportError as error:
        raise NotImplementedError(
            f'impl="{impl}" cannot be imported ({error}); install {impl} or use impl="reference".'
        ) from error


def _choose(query: Tensor) -> Impl:
    """Choose the implementation of ``impl="auto"``; each choice is logged once."""
    choice: Impl = "reference"
    reason = f"the tensors are on {query.device.type}"
    if query.device.type == "cuda":
        if query.dtype == torch.float64 or not 16 <= query.shape[2] <= 512:
            reason = f"no kernel takes {query.dtype} with head_dim {query.shape[2]}"
        else:
            choice = "triton"
    _log_choice(choice, reason)
    return choice


@functools.cache
def _log_choice(choice: str, reason: str) -> None:
    logger.info("canvas attention runs %s: %s.", choice, reason)
