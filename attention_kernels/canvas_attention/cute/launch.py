"""Canvas attention with FlashAttention-4 (CuTe DSL): checks, compilation, launch.

Compiles for Hopper and Blackwell and has never run on either: no test here executes it. What the
kernels compute is checked through the arithmetic they share with the tests (``visibility.py``).

A batch with too few query tiles for the GPU is cut into splits of its keys (``splits.py``), by
FlashAttention-4's own means: each split is a program that writes its output and log-sum-exp in
fp32. Which key tiles it walks is ours to say, and ``combine.py`` folds what they wrote.
"""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention_kernels.canvas_attention.batch import (
    AttentionOptions,
    PagedCache,
    Sequences,
)
from attention_kernels.canvas_attention.splits import (
    MIN_SPLIT_KEYS,
    longest_tile,
    multiprocessors,
    splits,
)

# Head sizes by the first number of a GPU's compute capability.
HEAD_DIMS = {9: (256, 512), 10: (256,)}
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16)
# Keeps a position and a window together within int32.
MAX_WINDOW = 2**30
# One vector load of the kernels.
ALIGN_BYTES = 16


@dataclass(frozen=True)
class CuteKernel:
    """All that one compiled kernel is made for; everything else varies from call to call."""

    capability: int  # the first number
    head_dim: int
    group: int  # query heads of a key head
    dtype: torch.dtype
    softcap: float
    has_window_left: bool
    has_window_right: bool
    canvas_anchor: bool
    split: bool  # whether it writes what splits of the keys find, or the whole

    @property
    def tile(self) -> tuple[int, int]:
        """Rows times heads, and keys, of a tile: stock's choice, narrower where registers also hold
        a window."""
        if self.capability == 10:
            return 128, 128
        if self.head_dim > 256:
            return 64, 64
        return 128, 64 if self.has_window_left or self.has_window_right else 80


def attend(
    query: Tensor,
    cache: PagedCache,
    sequences: Sequences,
    options: AttentionOptions,
    out: Tensor,
    *,
    num_splits: int | None = None,
) -> None:
    """Write the attention of every live row into ``out``; arguments as in ``api.py``.

    ``num_splits`` is the number of pieces that keys are cut into; chosen if left out.

    Raises:
        ValueError: If the dtype or the head size has no kernel, or a tensor's rows are not aligned.
        NotImplementedError: If there are image spans, no GPU, or one without a kernel for them.
    """
    if query.device.type != "cuda":
        raise NotImplementedError(
            f'impl="cute" needs CUDA tensors and got {query.device}; use impl="reference", or '
            'impl="triton" with TRITON_INTERPRET=1.'
        )
    check_inputs(query, cache, sequences)
    check_memory(query=query, key_cache=cache.key, value_cache=cache.value, out=out)
    capability = torch.cuda.get_device_capability(query.device)
    reason = refusal(capability, query.shape[2])
    if reason is not None:
        name = torch.cuda.get_device_name(query.device)
        raise NotImplementedError(f'impl="cute" {reason} The device is {name}.')
    launch(capability[0], query, cache, sequences, options, out, num_splits=num_splits)


def refusal(capability: tuple[int, int], head_dim: int) -> str | None:
    """Why a GPU of this compute capability does not run ``impl="cute"``, or None."""
    major, minor = capability
    if major not in HEAD_DIMS:
        return (
            f"needs a GPU of compute capability 9.x or 10.x and this one has {major}.{minor}; use "
            'impl="triton".'
        )
    if head_dim == 512 and major == 10:
        return (
            "cannot take head_dim 512 on compute capability 10.x: two tiles of scores and one of "
            'output want 768 of the 512 columns of tensor memory. Use impl="triton".'
        )
    if head_dim not in HEAD_DIMS[major]:
        allowed = " or ".join(map(str, HEAD_DIMS[major]))
        return (
            f"takes head_dim {allowed} on compute capability {major}.x and got {head_dim}; use "
            'impl="triton".'
        )
    return None


def check_inputs(query: Tensor, cache: PagedCache, sequences: Sequences) -> None:
    """Refuse what no GPU runs with ``impl="cute"``.

    Raises:
        ValueError: If a dtype or the head size has no kernel.
        NotImplementedError: If there are image spans.
    """
    if query.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f'query has dtype {query.dtype}; impl="cute" takes '
            f'{" and ".join(map(str, SUPPORTED_DTYPES))}. Use impl="triton" for others.'
        )
    if cache.key.dtype != query.dtype:
        raise ValueError(
            f'key_cache has dtype {cache.key.dtype}; impl="cute" takes that of query, '
            f'{query.dtype}. Use impl="triton" for an FP8 cache.'
        )
    if query.shape[2] not in HEAD_DIMS[9]:
        raise ValueError(
            f'query has head_dim {query.shape[2]}; impl="cute" takes 256 and 512. Use '
            'impl="triton" for others.'
        )
    if sequences.row_spans is not None:
        raise NotImplementedError(
            'row_spans are not built for impl="cute"; use impl="triton" for batches with images.'
        )


def check_memory(**tensors: Tensor) -> None:
    """Raise ValueError for a tensor whose rows do not start on ``ALIGN_BYTES``."""
    for name, tensor in tensors.items():
        strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        if any(stride % ALIGN_BYTES for stride in strides) or tensor.data_ptr() % ALIGN_BYTES:
            raise ValueError(
                f"{name} starts at address {tensor.data_ptr():#x} with strides of {strides} bytes; "
                f'impl="cute" needs multiples of {ALIGN_BYTES}. Copy it, or use impl="triton".'
            )


@functools.cache
def compile_kernel(kernel: CuteKernel) -> Any:
    """Compile one kernel: some seconds at its first call, so never inside a graph capture.

    Needs no GPU where ``CUTE_DSL_ARCH`` and ``FLASH_ATTENTION_ARCH`` name one.

    Raises:
        NotImplementedError: If the FlashAttention-4 that it extends is not installed.
    """
    name = f"sm{kernel.capability}0"
    try:
        module = importlib.import_module(f"attention_kernels.canvas_attention.cute.{name}")
        import cutlass
        import cutlass.cute as cute
        from quack.compile_utils import make_fake_tensor
    except ImportError as error:
        source = "vLLM 0.33 for CUDA" if kernel.capability == 9 else "flash-attn-4==4.0.0b36"
        raise NotImplementedError(
            f'impl="cute" cannot import the FlashAttention-4 of {source} ({error}); install it, or '
            'use impl="triton".'
        ) from error

    dtype = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[kernel.dtype]
    vector = ALIGN_BYTES * 8 // dtype.width

    def fake(kind: Any, divisibility: int, *shape: int | None) -> Any:
        sizes = [cute.sym_int() if size is None else size for size in shape]
        return make_fake_tensor(kind, sizes, divisibility=divisibility)

    rows = functools.partial(fake, dtype, vector)
    numbers = functools.partial(fake, cutlass.Int32, 1)
    attention = getattr(module, f"CanvasAttentionSm{kernel.capability}0")(
        dtype,
        kernel.head_dim,
        kernel.group,
        kernel.tile,
        kernel.softcap,
        kernel.canvas_anchor,
        kernel.split,
    )
    out, lse = rows(None, None, None), None
    if kernel.split:
        out = fake(cutlass.Float32, ALIGN_BYTES // 4, None, None, None, None)
        lse = fake(cutlass.Float32, 1, None, None, None)
    return cute.compile(
        attention,
        rows(None, None, None),
        rows(None, None, None, None),
        rows(None, None, None, None),
        out,
        lse,
        cutlass.Float32(0),
        numbers(None),
        numbers(2, None),
        numbers(None, None),
        cutlass.Int32(0) if kernel.has_window_left else None,
        cutlass.Int32(0) if kernel.has_window_right else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


def launch(
    capability: int,
    query: Tensor,
    cache: PagedCache,
    sequences: Sequences,
    options: AttentionOptions,
    out: Tensor,
    *,
    num_splits: int | None = None,
) -> None:
    """Launch on a GPU of this compute capability; ``num_splits`` fixes how the keys are cut."""
    window = options.window
    windows = [None if size < 0 else min(size, MAX_WINDOW) for size in (window.left, window.right)]
    kernel = CuteKernel(
        capability=capability,
        head_dim=query.shape[2],
        group=query.shape[1] // cache.key.shape[2],
        dtype=query.dtype,
        softcap=options.softcap,
        has_window_left=windows[0] is not None,
        has_window_right=windows[1] is not None,
        canvas_anchor=window.anchor == "canvas",
        split=False,
    )
    if num_splits is None:
        at_once = multiprocessors(query.device)
        num_splits = splits_of(kernel, query.shape, at_once, options, sequences)
    written, lse = out, None
    if num_splits > 1:
        kernel = replace(kernel, split=True)
        num_tokens, num_heads, _ = query.shape
        written = _scratch(num_splits, *query.shape, device=query.device)
        lse = _scratch(num_splits, num_heads, num_tokens, device=query.device)
    compile_kernel(kernel)(
        query,
        cache.key,
        cache.value,
        written,
        lse,
        options.scale,
        sequences.query_start_loc,
        # Stock's kernels hand one tensor of per-sequence numbers to the warps that load.
        torch.stack((sequences.seq_lens, sequences.causal_rows)),
        sequences.block_table,
        *windows,
    )
    if lse is not None:
        # What it is written in is imported where there are splits.
        from attention_kernels.canvas_attention.cute.combine import combine_splits

        combine_splits(written, lse, sequences.query_start_loc, sequences.seq_lens, out)


def splits_of(
    kernel: CuteKernel,
    query_shape: Sequence[int],
    at_once: int,
    options: AttentionOptions,
    sequences: Sequences,
) -> int:
    """Splits to launch for a batch, by its rows and its window; 1 from about four canvases on."""
    num_tokens, num_heads, head_dim = query_shape
    rows = kernel.tile[0]
    programs = -(-num_tokens * kernel.group // rows) * (num_heads // kernel.group)
    longest = longest_tile(options.window.left, sequences.query_bound)
    most = splits(programs, at_once, longest, rows * (head_dim + 1) * 4, options.most_splits)
    reach = sequences.key_bound
    if options.window.left >= 0:
        reach = min(reach, longest)
    return min(most, max(1, -(-reach // MIN_SPLIT_KEYS)))


def _scratch(*shape: int, device: torch.device) -> Tensor:
    """Uninitialised memory for partials; every number read from it was written in the launch."""
    return torch.empty(shape, dtype=torch.float32, device=device)
