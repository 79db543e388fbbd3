"""Time canvas attention on the layers of DiffusionGemma-26B, beside kernels that compute the same.

    python benchmarks/bench_canvas_attention.py                        # all shapes
    python benchmarks/bench_canvas_attention.py --requests 1 --contexts 16384 131072

A GPU replays each implementation from a graph, as it is served. Without one, layers of toy size run
through Triton's interpreter, which shows that the script works and nothing else. Prints, for each
shape and implementation, the median time and its spread, the ratio to ours, and bytes and
operations per second against limits measured in the same run. A peer runs only where it computes
the same mask, and its output is compared with ours before it is timed.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from records import Rows, parser_of
from timing import as_served, copy_rate, device, milliseconds, place, product_rate
from torch import Tensor

from attention_kernels.canvas_attention import (
    AttentionOptions,
    PagedCache,
    Sequences,
    Window,
    canvas_attention,
)
from attention_kernels.canvas_attention.api import Impl
from attention_kernels.canvas_attention.reference import row_bounds
from attention_kernels.testing import CanvasBatch, make_canvas_batch

ON_GPU = torch.cuda.is_available()
CANVAS = 256 if ON_GPU else 8
PREFILL_ROWS = 4 * CANVAS
DEVICE = device()


@dataclass(frozen=True)
class Layer:
    """An attention layer of the model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int  # keys on one side, -1 for all


LAYERS = [Layer("sliding", 16, 8, 256, 1023), Layer("full", 16, 2, 512, -1)]
if not ON_GPU:
    LAYERS = [Layer("sliding", 2, 2, 16, 15), Layer("full", 2, 1, 32, -1)]

# Name of a phase -> (query rows, causal rows) of each request.
PHASES: dict[str, Callable[[int], list[tuple[int, int]]]] = {
    "denoise": lambda n: [(CANVAS, 0)] * n,
    "encode": lambda n: [(CANVAS, CANVAS)] * n,
    "mixed": lambda n: [(CANVAS, 0 if i % 2 == 0 else CANVAS) for i in range(n)],
    "prefill": lambda n: [(PREFILL_ROWS, PREFILL_ROWS), *[(CANVAS, 0)] * (n - 1)],
    "fused": lambda n: [(2 * CANVAS, CANVAS)] * n,
}


@dataclass(frozen=True)
class Shape:
    """One batch to time, and the window anchor it is computed with."""

    layer: Layer
    phase: str
    anchor: str
    rows: list[tuple[int, int]]
    batch: CanvasBatch
    context: int

    @property
    def window(self) -> Window:
        """Which keys a row sees."""
        right = self.layer.window if self.anchor == "query" else -1
        return Window(self.layer.window, right, "canvas" if self.anchor == "canvas" else "query")

    def arguments(self) -> tuple[Tensor, PagedCache, Sequences, AttentionOptions]:
        """Arguments of our functions."""
        return self.batch.arguments(
            AttentionOptions(self.layer.head_dim**-0.5, window=self.window),
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
        )

    @property
    def max_query_len(self) -> int:
        """Rows of the longest request."""
        return max(query_len for query_len, _ in self.rows)

    @property
    def max_seq_len(self) -> int:
        """Keys of the longest request."""
        return self.context + self.max_query_len

    @property
    def has_stock_mask(self) -> bool:
        """Whether kernels with one causal flag a sequence compute the same mask."""
        same_window = self.layer.window < 0 or self.anchor == "query"
        return same_window and all(causal in (0, length) for length, causal in self.rows)

    def work(self) -> tuple[float, float]:
        """Bytes that must move and operations that must run: what is seen, each key read once."""
        layer, num_bytes, operations = self.layer, 0, 0
        for query_len, causal in self.rows:
            lower, upper = row_bounds(
                query_len, self.context + query_len, causal, self.window, "cpu"
            )
            keys = int(upper.max() - lower.min())
            num_bytes += 2 * keys * layer.num_kv_heads * layer.head_dim * 2
            num_bytes += 2 * query_len * layer.num_heads * layer.head_dim * 2
            operations += 4 * int((upper - lower).sum()) * layer.num_heads * layer.head_dim
        return float(num_bytes), float(operations)


def ours(shape: Shape, impl: Impl = "triton") -> Callable[[], Tensor]:
    """Our Triton kernel, or another of ours, as the back end calls it."""
    arguments, out = shape.arguments(), torch.empty_like(shape.batch.query)
    return lambda: canvas_attention(*arguments, out=out, impl=impl)


def cut(shape: Shape, num_splits: int | None = None, **changes: int) -> Callable[[], Tensor] | None:
    """Our Triton kernel with its work cut in another way than it would choose."""
    from attention_kernels.canvas_attention.triton.launch import CanvasLaunch, Cut, choose_config

    batch, out = shape.batch, torch.empty_like(shape.batch.query)
    chosen = choose_config(batch.query, batch.key_cache.dtype)
    config = replace(chosen, **changes)
    if changes and config == chosen:
        return None
    query, cache, sequences, attention = shape.arguments()
    launch = CanvasLaunch(query, cache, sequences, attention, Cut(config, num_splits))

    def call() -> Tensor:
        launch(query, cache, out)
        return out

    return call


def cut_cute(shape: Shape, num_splits: int) -> Callable[[], Tensor]:
    """``impl="cute"`` with its keys cut otherwise than it would choose."""
    from attention_kernels.canvas_attention.cute.launch import launch

    arguments, out = shape.arguments(), torch.empty_like(shape.batch.query)

    def call() -> Tensor:
        capability = torch.cuda.get_device_capability(DEVICE)[0]
        launch(capability, *arguments, out, num_splits=num_splits)
        return out

    return call


def causal_flags(shape: Shape) -> Tensor:
    """int32 [num_requests]: 1 where a request is causal."""
    return torch.tensor([int(c > 0) for _, c in shape.rows], dtype=torch.int32, device=DEVICE)


def paged(shape: Shape, kernel: Callable[..., object], **options: object) -> Callable[[], Tensor]:
    """A kernel that takes the cache and the sequences as vLLM's own ones do."""
    batch, out = shape.batch, torch.empty_like(shape.batch.query)
    arguments = {
        "q": batch.query,
        "k": batch.key_cache,
        "v": batch.value_cache,
        "out": out,
        "cu_seqlens_q": batch.query_start_loc,
        "max_seqlen_q": shape.max_query_len,
        "seqused_k": batch.seq_lens,
        "max_seqlen_k": shape.max_seq_len,
        "softmax_scale": shape.layer.head_dim**-0.5,
        "block_table": batch.block_table,
    }

    def call() -> Tensor:
        kernel(**arguments, **options)
        return out

    return call


def stock_triton(shape: Shape) -> Callable[[], Tensor] | None:
    """Stock vLLM's Triton kernel with its flag per sequence."""
    if not shape.has_stock_mask:
        return None
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    window = (shape.layer.window, 0) if shape.layer.window >= 0 else (-1, -1)
    unscaled = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    flags = causal_flags(shape)
    return paged(
        shape, unified_attention, causal=flags, window_size=window, softcap=0.0, **unscaled
    )


def flash_attention(shape: Shape, version: int) -> Callable[[], Tensor] | None:
    """FlashAttention inside vLLM: 4 with a flag per sequence, 3 with one flag for the batch."""
    flags = {int(causal > 0) for _, causal in shape.rows}
    if not shape.has_stock_mask or (version == 3 and len(flags) > 1):
        return None
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    window = shape.layer.window
    options: dict[str, object] = {"window_size": [window, window] if window >= 0 else None}
    if version == 4:
        # As in vLLM's back end: with a window, the flags alone decide what is causal.
        options |= {"dynamic_causal": causal_flags(shape), "causal": window < 0}
    else:
        options["causal"] = flags == {1}
        if window >= 0 and options["causal"]:
            options["window_size"] = [window, 0]
    return paged(shape, flash_attn_varlen_func, fa_version=version, **options)


IMPLEMENTATIONS: dict[str, Callable[[Shape], Callable[[], Tensor] | None]] = {
    "ours": ours,
    "cute": lambda shape: ours(shape, "cute"),
    "cute-unsplit": lambda shape: cut_cute(shape, 1),
    "cute-split-4": lambda shape: cut_cute(shape, 4),
    "unsplit": lambda shape: cut(shape, 1),
    "split-2": lambda shape: cut(shape, 2),
    "split-4": lambda shape: cut(shape, 4),
    "rows-64": lambda shape: cut(shape, block_m=64, parts=1),
    "keys-16": lambda shape: cut(shape, block_n=16) if shape.layer.window < 0 else None,
    "keys-64": lambda shape: cut(shape, block_m=64, block_n=64, num_stages=1, parts=1),
    "stock-triton": stock_triton,
    "stock-fa4": lambda shape: flash_attention(shape, 4),
    "stock-fa3": lambda shape: flash_attention(shape, 3),
}


def shapes(options: argparse.Namespace) -> Iterator[Shape]:
    """Every batch that was asked for and fits the device."""
    layers = [layer for layer in LAYERS if layer.name in options.layers]
    asked = itertools.product(layers, options.requests, options.contexts, options.phases)
    for layer, num_requests, context, phase in asked:
        rows = PHASES[phase](num_requests)
        longest = context + max(length for length, _ in rows)
        needed = num_requests * longest * 2 * 2 * layer.num_kv_heads * layer.head_dim
        if ON_GPU and 2 * needed > torch.cuda.mem_get_info()[0]:
            print(f"# {layer.name} {num_requests} x {context} {phase}: no memory for it")
            continue
        batch = make_canvas_batch(
            [length for length, _ in rows],
            [context + length for length, _ in rows],
            [causal for _, causal in rows],
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=options.block_size,
            dtype=torch.bfloat16 if ON_GPU else torch.float32,
            device=str(DEVICE),
        )
        for anchor in ["canvas", "query"] if layer.window >= 0 else ["canvas"]:
            yield Shape(layer, phase, anchor, rows, batch, context)


def report(
    shape: Shape, limits: tuple[float, float], peers: list[str], repeats: int, data: Rows
) -> None:
    """One row for each implementation of a shape."""
    num_bytes, operations = shape.work()
    # Below the limit line of the roofline: the larger of the two times is what could be reached.
    best_ms = max(num_bytes / limits[0], operations / limits[1]) * 1e3
    columns = {
        "layer": shape.layer.name,
        "requests": len(shape.rows),
        "context": shape.context,
        "phase": shape.phase,
        "anchor": shape.anchor,
    }
    expected = ours(shape)()
    ours_ms = None
    for name in ["ours", *peers]:
        try:
            call = IMPLEMENTATIONS[name](shape)
            if call is None:
                continue
            difference = (call().float() - expected.float()).abs().max().item()
            median, low, high = milliseconds(as_served(call), repeats)
        except Exception as error:  # a peer that cannot run here must not end the run
            if name == "ours":
                raise
            reason = str(error).splitlines()[0][:90]
            data.add("attention that cannot run", **columns, which=name, reason=reason)
            continue
        ours_ms = ours_ms or median
        data.add(
            "attention",
            **columns,
            which=name,
            ms=round(median, 4),
            quartiles=f"{low:.4f} to {high:.4f}",
            of_ours=round(median / ours_ms, 3),
            gigabytes_a_second=round(num_bytes / median / 1e6),
            teraflops=round(operations / median / 1e9, 1),
            of_limit=round(best_ms / median, 3),
            differs=difference,
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536, 131072]
    )
    names = [layer.name for layer in LAYERS]
    parser.add_argument("--layers", nargs="+", choices=names, default=names)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    others = list(IMPLEMENTATIONS)[1:]
    parser.add_argument("--peers", nargs="*", choices=others, default=others)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=30 if ON_GPU else 1)
    options = parser.parse_args()
    data = Rows(options.data)
    limits = (copy_rate(), product_rate()) if ON_GPU else (copy_rate(2**20), product_rate(64))
    print(
        f"{place('flash-attn-4')}; block size {options.block_size}; measured limits: "
        f"{limits[0] / 1e9:.0f} GB/s copied, {limits[1] / 1e12:.0f} TFLOP/s bf16"
    )
    for shape in shapes(options):
        report(shape, limits, options.peers, options.repeats, data)


if __name__ == "__main__":
    main()
