"""Tune vLLM's Triton expert kernel for the passes of a diffusion model, on the GPU at hand.

    python benchmarks/tune_experts.py --dtype fp8 bf16 --tp 1 --out tuned
    VLLM_TUNED_CONFIG_FOLDER=tuned vllm serve MODEL --moe-backend triton

Defaults are DiffusionGemma-26B's experts (128 of width 704, 8 a token, hidden size 2816) and the
rows of 1 to 32 canvases. Each file is named and written as vLLM's loader expects it. It replaces
what vLLM has for the shape at every number of rows, so it also holds vLLM's own choice for fewer
rows than are tuned; and a tuned entry differs from that choice only where it measured faster.

Without ``--moe-backend triton`` vLLM prefers CUTLASS for per-channel FP8 on Hopper, which reads no
such file: compare both.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from records import Rows, parser_of
from timing import as_served, device, milliseconds

Config = dict[str, int]
# Seconds of one call with these rows and this configuration; infinity where it cannot run.
Timer = Callable[[int, Config], float]

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128, 256),
    "GROUP_SIZE_M": (1, 8, 16, 32),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
ROWS = (256, 512, 1024, 2048, 4096, 8192)
# Rows of prefills and narrow canvases, which keep vLLM's choice.
FEWER_ROWS = (1, 4, 16, 64, 128)
# A smaller gain is within the spread of a median.
GAIN = 0.99


@dataclass(frozen=True)
class Experts:
    """The experts of a layer on one rank.

    Attributes:
        num_experts: E.
        width: N, of this rank's shard.
        hidden_size: K.
        top_k: Experts of a token.
        dtype: ``"fp8"`` (weights per channel, activations per token) or ``"bf16"``.
    """

    num_experts: int
    width: int
    hidden_size: int
    top_k: int
    dtype: str

    @property
    def dtype_name(self) -> str | None:
        """What vLLM calls it in file names."""
        return "fp8_w8a8" if self.dtype == "fp8" else None


def is_sensible(config: Config, experts: Experts, rows: int, shared_bytes: int) -> bool:
    """Whether the tiles fit a block's shared memory and are not mostly padding."""
    m, n, k = (config[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    item = 1 if experts.dtype == "fp8" else 2
    rows_per_expert = rows * experts.top_k / experts.num_experts
    return (
        (m + n) * k * item * config["num_stages"] <= shared_bytes
        and m <= max(16, 4 * rows_per_expert)
        and n <= max(AXES["BLOCK_SIZE_N"][0], 2 * experts.width)
    )


def neighbours(config: Config) -> Iterator[Config]:
    """Every configuration that differs in one value."""
    for axis, values in AXES.items():
        for value in values:
            if value != config.get(axis):
                yield config | {axis: value}


def search(
    starts: list[Config], time_of: Callable[[Config], float], is_allowed: Callable[[Config], bool]
) -> tuple[Config, float]:
    """Walk from the fastest start to a configuration that no neighbour beats.

    Args:
        starts: At least one; the first is kept unless another is faster by more than ``1 - GAIN``.
        time_of: Seconds of a configuration.
        is_allowed: Which to try; the first start is tried in any case.

    Returns:
        The configuration and its seconds.
    """
    known: dict[tuple[tuple[str, int], ...], float] = {}

    def seconds(config: Config) -> float:
        key = tuple(sorted(config.items()))
        if key not in known:
            known[key] = time_of(config)
        return known[key]

    best = starts[0]
    moved = True
    others = starts[1:]
    while moved:
        moved = False
        for config in (*others, *neighbours(best)):
            if is_allowed(config) and seconds(config) < GAIN * seconds(best):
                best, moved = config, True
        others = []
    return best, seconds(best)


def tune(
    experts: Experts,
    rows: tuple[int, ...],
    timer: Timer,
    current: Callable[[int], Config],
    shared_bytes: int,
) -> dict[int, tuple[Config, float, float]]:
    """The fastest configuration found for each number of rows.

    Returns:
        By rows: the configuration, its seconds, and those of vLLM's current choice.
    """
    found: dict[int, tuple[Config, float, float]] = {}
    previous: list[Config] = []
    for count in rows:
        baseline = current(count)
        best, seconds = search(
            [baseline, *previous],
            lambda config, count=count: timer(count, config),
            lambda config, count=count: is_sensible(config, experts, count, shared_bytes),
        )
        found[count] = (best, seconds, timer(count, baseline))
        previous = [best]
    return found


def write(folder: Path, experts: Experts, configs: dict[int, Config]) -> Path:
    """Write the file that vLLM's loader looks for.

    Args:
        folder: For ``VLLM_TUNED_CONFIG_FOLDER``; created.
        experts: What was tuned.
        configs: By rows.
    """
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name

    path = folder / get_config_file_name(experts.num_experts, experts.width, experts.dtype_name)
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"triton_version": version("triton")}
    content |= {str(rows): configs[rows] for rows in sorted(configs)}
    path.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
    return path


def current_choice(experts: Experts) -> Callable[[int], Config]:
    """What vLLM takes for a number of rows now: of a file that it has, or its default."""
    from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

    E, N, K = experts.num_experts, experts.width, experts.hidden_size
    return lambda rows: dict(
        try_get_optimal_moe_config(
            (E, 2 * N, K), (E, K, N), experts.top_k, experts.dtype_name, rows
        )
    )


def gpu_timer(experts: Experts) -> Timer:
    """Times replays of vLLM's whole expert operator on the current GPU; the weights are far beyond
    its cache.
    """
    import torch
    import triton
    from vllm.model_executor.layers.fused_moe import MoEActivation, override_config
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    E, N, K = experts.num_experts, experts.width, experts.hidden_size
    torch.manual_seed(0)

    def weights(*shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device()).uniform_(-0.1, 0.1)
        return values.to(torch.float8_e4m3fn) if experts.dtype == "fp8" else values

    up, down = weights(E, 2 * N, K), weights(E, K, N)
    quant_config = None
    if experts.dtype == "fp8":
        quant_config = fp8_w8a8_moe_quant_config(
            w1_scale=torch.ones(E, 2 * N, 1, device=device()),
            w2_scale=torch.ones(E, K, 1, device=device()),
            per_act_token_quant=True,
            per_out_ch_quant=True,
        )

    def timer(rows: int, config: Config) -> float:
        hidden = torch.randn(rows, K, dtype=torch.bfloat16, device=device())
        chosen = torch.rand(rows, E, device=device()).topk(experts.top_k)
        share = chosen.values.softmax(dim=-1)
        ids = chosen.indices.to(torch.int32)

        def call() -> None:
            fused_experts(
                hidden,
                up,
                down,
                share,
                ids,
                activation=MoEActivation.GELU_TANH,
                quant_config=quant_config,
            )

        with override_config(config):
            try:
                call()
                # As served: an eager call of few rows takes as long as the host needs to launch it.
                median, _, _ = milliseconds(as_served(call))
            except triton.runtime.errors.OutOfResources:
                return float("inf")
        return median / 1e3

    return timer


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", nargs="+", choices=("fp8", "bf16"), default=["fp8", "bf16"])
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4], help="ranks; one file each")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=704, help="of an expert, unsharded")
    parser.add_argument("--hidden-size", type=int, default=2816)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("tuned"))
    args = parser.parse_args(argv)
    data = Rows(args.data)

    import torch

    if not torch.cuda.is_available():
        print(
            "tune_experts.py times kernels and needs an NVIDIA GPU, and torch finds none here.",
            file=sys.stderr,
        )
        return 2
    shared_bytes = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for dtype in args.dtype:
        for tp in args.tp:
            experts = Experts(args.experts, args.width // tp, args.hidden_size, args.top_k, dtype)
            current = current_choice(experts)
            found = tune(
                experts, tuple(sorted(args.rows)), gpu_timer(experts), current, shared_bytes
            )
            kept = {rows: current(rows) for rows in FEWER_ROWS if rows < min(found)}
            path = write(
                args.out, experts, kept | {rows: best for rows, (best, _, _) in found.items()}
            )
            print(f"{torch.cuda.get_device_name()}, {dtype}, TP {tp}: {path}")
            for rows, (best, seconds, before) in found.items():
                data.add(
                    "experts",
                    dtype=dtype,
                    tp=tp,
                    rows=rows,
                    us_before=round(before * 1e6, 1),
                    us_tuned=round(seconds * 1e6, 1),
                    config=best,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
