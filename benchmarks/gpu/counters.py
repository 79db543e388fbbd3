"""What a pass costs the host, measured without running a kernel.

    python benchmarks/gpu/counters.py

The host's time is that of the Python of a pass with kernels left out, in units of one of PyTorch's
smallest operations on this machine, so that it can be compared between machines. A test holds it to
``tests/baselines.json``. What a pass launches is counted on the null GPU (``tests/null_gpu``).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_kernels import AttentionOptions, Sequences, Window, canvas_attention
from attention_kernels.testing import CanvasBatch
from attention_kernels.vocab_statistics import RowDraws, RowLogits, api
from vllm_diffusion.sampling.logprobs import LogprobsRequest
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.row_settings import (
    CandidateFilters,
    FilteredRows,
    ReportedRows,
    RowSettings,
)
from vllm_diffusion.sampling.vocabulary_stream import TILE_ON_GPU, sample_rows

# What it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from data_file import DataFile

VOCAB, CANVAS = 262144, 256
# The chip whose configurations are launched.
CAPABILITY, MULTIPROCESSORS = (9, 0), 132
ROUNDS = 10


@contextlib.contextmanager
def kernels_left_out() -> Iterator[None]:
    """Triton kernels are chosen for a GPU inside, and none is launched."""
    from attention_kernels.canvas_attention.triton import configs, launch
    from attention_kernels.canvas_attention.triton.attend import canvas_attention_kernel
    from attention_kernels.vocab_statistics import triton

    def chosen(query: Tensor, cache_dtype: torch.dtype) -> configs.TritonConfig:
        return configs.tuned_config(query.shape[2], query.dtype, cache_dtype, CAPABILITY)

    def nothing(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def scratch(size: int, device: torch.device) -> Tensor:
        # On the CPU the system would be asked for its pages in every call.
        return torch.empty(size, device="meta")

    def implementation(impl: api.Impl, rows: RowLogits) -> Any:
        # No mock, which would keep every tile that it is asked about.
        return triton

    with (
        mock.patch.object(type(canvas_attention_kernel), "__getitem__", nothing),
        mock.patch.object(launch, "_scratch", scratch),
        mock.patch.object(launch, "choose_config", chosen),
        mock.patch.object(launch, "multiprocessors", return_value=MULTIPROCESSORS),
        mock.patch.object(api, "_implementation", implementation),
    ):
        yield


# Name, query heads, key heads, head size and window of the model's layers.
LAYERS = (("sliding", 16, 8, 256, 1023), ("full", 16, 2, 512, -1))


def attention_inputs(
    length: int, canvases: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, CanvasBatch]:
    """The cache of a layer as the engine has it, and canvases that all end at ``length`` keys."""
    cache = torch.empty(4, num_kv_heads, 16, 2 * head_dim, dtype=torch.bfloat16)
    by_token = cache.transpose(1, 2)

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    batch = CanvasBatch(
        query=torch.empty(canvases * CANVAS, num_heads, head_dim, dtype=torch.bfloat16),
        key_cache=by_token[..., :head_dim],
        value_cache=by_token[..., head_dim:],
        block_table=integers(canvases, length // 16),
        query_start_loc=integers(canvases + 1),
        seq_lens=integers(canvases),
        causal_rows=integers(canvases),
    )
    return cache, batch


def attention_calls() -> dict[str, Callable[[], object]]:
    """A layer of each kind, short and at the length that graphs are captured for."""
    calls = {}
    for name, *heads, window in LAYERS:
        for length, canvases in ((1280, 1), (32768, 1), (32768, 4)):
            _, batch = attention_inputs(length, canvases, *heads)
            arguments = batch.arguments(
                AttentionOptions(0.1, window=Window(window)),
                max_query_len=CANVAS,
                max_seq_len=length,
            )
            out = torch.empty_like(batch.query)
            calls[f"attention, {name} layer, {canvases} x canvas, {length} keys"] = (
                lambda arguments=arguments, out=out: canvas_attention(
                    *arguments, out=out, impl="triton"
                )
            )
    return calls


def layer_calls() -> dict[str, Callable[[], object]]:
    """A layer of a pass as the engine calls it: the first of its kind, and those behind it."""
    try:
        from vllm_diffusion.attention import backend, metadata
    except ImportError:
        # Where the engine is not installed, none of it calls a layer.
        return {}
    config = SimpleNamespace(
        additional_config={"diffusion": {"attention": "triton"}}, model_config=SimpleNamespace()
    )
    calls: dict[str, Callable[[], object]] = {}
    for name, num_heads, num_kv_heads, head_dim, window in LAYERS:
        with mock.patch.object(backend, "get_current_vllm_config", return_value=config):
            impl = backend.CanvasAttentionImpl(
                num_heads, head_dim, 0.1, num_kv_heads, sliding_window=window + 1 or None
            )
        cache, batch = attention_inputs(32768, 1, num_heads, num_kv_heads, head_dim)
        step = metadata.CanvasAttentionMetadata(
            Sequences(
                batch.block_table,
                batch.query_start_loc,
                batch.seq_lens,
                batch.causal_rows,
                max_query_len=CANVAS,
                max_seq_len=32768,
            ),
            num_tokens=CANVAS,
            window_anchor="canvas",
        )
        new = batch.key_cache[0, :1]
        out = torch.empty_like(batch.query)

        def forward(
            impl: Any = impl, step: Any = step, batch: Any = batch, rest: Any = (new, cache, out)
        ) -> None:
            new, cache, out = rest
            impl.forward(None, batch.query, new, new, cache, step, out)

        def first(forward: Any = forward, step: Any = step) -> None:
            step.plans.clear()
            forward()

        calls[f"attention, {name} layer of a pass, the first"] = first
        calls[f"attention, {name} layer of a pass, each other"] = forward
    return calls


def sampling_calls(tile: int) -> dict[str, Callable[[], object]]:
    """A pass of one row: plain, and with settings that leave the graphs.

    The row is so short that arithmetic costs nothing, in as many tiles as a pass on a GPU has.
    """
    vocab = (VOCAB // TILE_ON_GPU) * tile
    weight, row = torch.zeros(vocab, 1), torch.zeros(1, 1)
    head = OutputHead(weight, weight, 0, 30.0, torch.float32, F.linear, 1, vocab)
    ones, integers = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    draws = RowDraws(ones, ones, integers.long(), integers, integers, integers)
    index = np.arange(1)
    wanted = LogprobsRequest(5, integers.long()[:, None][:, :0], integers, as_logits=False)
    top_p = FilteredRows(index, CandidateFilters(None, ones * 0.95, None))
    settings = {
        "plain": RowSettings(draws, None, None, None),
        "top_p of one request": RowSettings(draws, None, top_p, None),
        "log-probabilities of one request": RowSettings(
            draws, None, None, ReportedRows(index, wanted, None, ones)
        ),
    }
    return {
        f"sampling, 1 x canvas, {name}": lambda requests=requests: sample_rows(
            head, row, requests, vocab, tile
        )
        for name, requests in settings.items()
    }


def host_costs() -> dict[str, float]:
    """The host's time of each call, in smallest operations of PyTorch.

    The least of some rounds, in turn with the least of the operation's: on a busy machine both are
    what nothing else took time from.
    """
    a, b, c = (torch.zeros(1) for _ in range(3))

    def smallest() -> None:
        for _ in range(1000):
            torch.add(a, b, out=c)

    calls = sampling_calls(tile=VOCAB // TILE_ON_GPU) | attention_calls() | layer_calls()
    ratios = {}
    with kernels_left_out():
        for name, call in calls.items():
            repeats = 3 if name.startswith("sampling") else 100

            def repeated(call: Callable[[], object] = call, repeats: int = repeats) -> None:
                for _ in range(repeats):
                    call()

            repeated()
            pairs = [(_seconds(repeated), _seconds(smallest)) for _ in range(ROUNDS)]
            calls_took, operations_took = map(min, zip(*pairs, strict=True))
            ratios[name] = (calls_took / repeats) / (operations_took / 1000)
    return ratios


def _seconds(call: Callable[[], object]) -> float:
    """Of this thread on a processor, whoever else wanted it meanwhile."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    data = DataFile(parser.parse_args().data)
    for name, ratio in host_costs().items():
        print(f"{name}: as long on the host as {ratio:.0f} small operations")
        data.add("host", what=name, small_operations=round(ratio))
    return 0


if __name__ == "__main__":
    sys.exit(main())
