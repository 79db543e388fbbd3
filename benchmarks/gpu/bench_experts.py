"""Time a layer's experts and dense products by one of vLLM's back ends, replayed from a graph.

    python benchmarks/gpu/bench_experts.py --moe cutlass --linear cutlass
    python benchmarks/gpu/bench_experts.py --moe humming --humming-input fp8
    python benchmarks/gpu/bench_experts.py --moe triton --tiles wheel-h100

Six layers of the 26B shape in FP8 with random weights, as the engine makes them. vLLM keeps the
back end that it chose, so each takes a process of its own. Experts are called with all of them
awake, and with as many as trained routers wake for a canvas. Without a GPU the shipped checkpoint's
layers run on the CPU, which shows that the script works.
"""

from collections.abc import Callable
from typing import Any

import torch
from backends import ON_GPU, add_options, named, runner_of, start
from records import Rows, flat, parser_of
from timing import as_served, device, milliseconds, place

LAYERS = 6
# Of 128 experts, those that the rows of one canvas wake in trained weights.
AWAKE = 84 / 128


def products(layers: Any, rows: int) -> dict[str, Callable[[], object]]:
    """Calls by name: of the first layer, a sliding one, and the last, a full one."""
    sliding, full = layers[0], layers[-1]
    num_experts = sliding.router.per_expert_scale.shape[0]
    dtype = next(sliding.parameters()).dtype if not ON_GPU else torch.bfloat16

    def drawn(width: int) -> torch.Tensor:
        return torch.randn(rows, width, dtype=dtype, device=device())

    hidden = drawn(sliding.router.hidden_size)
    logits = torch.randn(rows, num_experts, device=device())
    fewer = logits.clone()
    awake = round(num_experts * AWAKE)
    fewer[:, awake:] = -1e4
    inputs = {layer: drawn(layer.self_attn.o_proj.input_size) for layer in (sliding, full)}
    return {
        "experts": lambda: sliding.experts(hidden, logits),
        f"experts, {awake} of {num_experts} awake": lambda: sliding.experts(hidden, fewer),
        "qkv": lambda: sliding.self_attn.qkv_proj(hidden),
        "o": lambda: sliding.self_attn.o_proj(inputs[sliding]),
        "qkv, full layer": lambda: full.self_attn.qkv_proj(hidden),
        "o, full layer": lambda: full.self_attn.o_proj(inputs[full]),
        "mlp": lambda: sliding.mlp(hidden),
    }


def main() -> None:
    parser = parser_of(__doc__)
    add_options(parser)
    rows = [256, 2048, 4096, 8192] if ON_GPU else [8]
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    options = parser.parse_args()
    data = Rows(options.data)
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    limits = {"max_num_batched_tokens": max(options.rows), "gpu_memory_utilization": 0.5}
    sizes = {"max_model_len": 6144, "max_num_seqs": 8} if ON_GPU else {"max_model_len": 256}
    # The engine ends with the last name for it.
    llm = start(options, 16, LAYERS, enforce_eager=True, **sizes, **(limits if ON_GPU else {}))
    runner = runner_of(llm)
    config, layers = runner.vllm_config, runner.model.model.layers
    print(place("humming-kernels"))
    for rows in options.rows:
        with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=rows):
            for what, call in products(layers, rows).items():
                columns = {**named(options), "rows": rows, "what": what}
                try:
                    call()
                    median, low, high = milliseconds(as_served(call))
                except Exception as error:  # one that cannot run must not end the others
                    data.add("products that cannot run", **columns, reason=flat(error)[:200])
                    continue
                us = round(median * 1e3, 1)
                spread = f"{low * 1e3:.1f} to {high * 1e3:.1f}"
                data.add("products", **columns, us=us, quartiles=spread)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
