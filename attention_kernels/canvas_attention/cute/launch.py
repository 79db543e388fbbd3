"""Canvas attention with FlashAttention-4 (CuTe DSL): checks, compilation, launch.

Compiles for Hopper and Blackwell and has never run on either: no test here executes it. What the
kernels compute is checked through the arithmetic they share with the tests (``visibility.py``).
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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

    @property
    def tile_n(self) -> int:
        """Keys of a tile, stock's choice: narrower where registers also hold a window."""
        if self.capability == 10:
            return 128
        if self.head_dim > 256 or self.has_window_left or self.has_window_right:
            return 64
        return 80


def canvas_attention_cute(
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

    The launch bounds are not used: the grid follows from the number of tokens, and no tile is cut.
    """
    if query.device.type != "cuda":
        raise NotImplementedError(
            f'impl="cute" needs CUDA tensors and got {query.device}; use impl="reference", or '
            'impl="triton" with TRITON_INTERPRET=1.'
        )
    check_inputs(query, key_cache, row_spans)
    _canvas_attention_op(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        causal_rows,
        out,
        scale,
        softcap,
        window_left,
        window_right,
        window_anchor == "canvas",
    )


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


def check_inputs(query: Tensor, key_cache: Tensor, row_spans: Tensor | None) -> None:
    """Raise for what no GPU runs with ``impl="cute"``.

    Raises:
        ValueError: If a dtype or the head size has no kernel.
        NotImplementedError: If there are image spans.
    """
    if query.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f'query has dtype {query.dtype}; impl="cute" takes '
            f'{" and ".join(map(str, SUPPORTED_DTYPES))}. Use impl="triton" for others.'
        )
    if key_cache.dtype != query.dtype:
        raise ValueError(
            f'key_cache has dtype {key_cache.dtype}; impl="cute" takes that of query, '
            f'{query.dtype}. Use impl="triton" for an FP8 cache.'
        )
    if query.shape[2] not in HEAD_DIMS[9]:
        raise ValueError(
            f'query has head_dim {query.shape[2]}; impl="cute" takes 256 and 512. Use '
            'impl="triton" for others.'
        )
    if row_spans is not None:
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

    def rows(*shape: int | None) -> Any:
        sizes = [cute.sym_int() if size is None else size for size in shape]
        return make_fake_tensor(dtype, sizes, divisibility=vector)

    def numbers(*shape: int | None) -> Any:
        sizes = [cute.sym_int() if size is None else size for size in shape]
        return make_fake_tensor(cutlass.Int32, sizes, divisibility=1)

    attention = getattr(module, f"CanvasAttentionSm{kernel.capability}0")(
        dtype, kernel.head_dim, kernel.group, kernel.tile_n, kernel.softcap, kernel.canvas_anchor
    )
    return cute.compile(
        attention,
        rows(None, None, None),
        rows(None, None, None, None),
        rows(None, None, None, None),
        rows(None, None, None),
        cutlass.Float32(0),
        numbers(None),
        numbers(2, None),
        numbers(None, None),
        cutlass.Int32(0) if kernel.has_window_left else None,
        cutlass.Int32(0) if kernel.has_window_right else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


@torch.library.custom_op("attention_kernels::canvas_attention_cute", mutates_args=("out",))
def _canvas_attention_op(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    out: Tensor,
    scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    canvas_anchor: bool,
) -> None:
    # Here and not before the operator, where a compiler's tensors have no memory.
    check_memory(query=query, key_cache=key_cache, value_cache=value_cache, out=out)
    capability = torch.cuda.get_device_capability(query.device)
    reason = refusal(capability, query.shape[2])
    if reason is not None:
        name = torch.cuda.get_device_name(query.device)
        raise NotImplementedError(f'impl="cute" {reason} The device is {name}.')
    windows = [None if size < 0 else min(size, MAX_WINDOW) for size in (window_left, window_right)]
    kernel = CuteKernel(
        capability=capability[0],
        head_dim=query.shape[2],
        group=query.shape[1] // key_cache.shape[2],
        dtype=query.dtype,
        softcap=softcap,
        has_window_left=windows[0] is not None,
        has_window_right=windows[1] is not None,
        canvas_anchor=canvas_anchor,
    )
    compile_kernel(kernel)(
        query,
        key_cache,
        value_cache,
        out,
        scale,
        query_start_loc,
        # Stock's kernels hand one tensor of per-sequence numbers to the warps that load.
        torch.stack((seq_lens, causal_rows)),
        block_table,
        *windows,
    )


@_canvas_attention_op.register_fake
def _(*args: object, **kwargs: object) -> None:
    """Writes ``out`` and returns nothing."""
