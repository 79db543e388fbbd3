"""What a pass asks of the CUDA driver and of the host: ours and stock's class, on a GPU that
computes nothing.

    python benchmarks/bench_pass_overhead.py

Both serve the shipped checkpoint on vLLM's CUDA platform and the null GPU (``tests/null_gpu``),
with their graphs captured. Counted are passes in which every request denoises its canvas. A graph
is one launch, whatever is in it; the backbone is one graph on both sides. The host's time is that
of the engine's thread in a whole pass, kernels taking none, in units of one of PyTorch's smallest
operations, so that machines can be compared.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.null_gpu.engine_cases import PROMPT, decide_outcomes, drop, start
from tests.support.models.checkpoints import SHIPPED
from tests.support.null_gpu.counts import counts_of, summary
from tests.support.null_gpu.processes import NullGpu

# Environment and options of each side's engine. FlashAttention-4 has a CUDA runtime that a null GPU
# lacks.
SIDES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "ours": ({}, {}),
    "stock": ({"VLLM_DIFFUSION_DISABLE": "1"}, {"attention_backend": "TRITON_ATTN"}),
}
REQUESTS = (1, 8, 32, 64, 128)
# Beyond them stock's sampler reads, as an index, what the null GPU has not computed.
MOST_OF_STOCK = 8
WARM_UP, PASSES = 6, 8
COUNTED = ("graphs", "kernels", "copies", "waits_for_events", "waits_for_streams")


def steady(model: str, options: dict[str, Any], requests: Sequence[int]) -> dict[str, Any]:
    """By number of requests, what is counted and timed of a pass; runs on the null GPU."""
    import torch
    from vllm import SamplingParams

    decide_outcomes()
    engine = start(model, **options).llm_engine
    times: list[float] = []
    a, b, c = (torch.zeros(1) for _ in range(3))

    def timed(call: Callable[[], object]) -> float:
        began = time.thread_time()
        call()
        return time.thread_time() - began

    def smallest() -> None:
        for _ in range(1000):
            torch.add(a, b, out=c)

    found = {}
    for n in requests:
        ids = [f"steady {n} {i}" for i in range(n)]
        for request_id in ids:
            # Stock's class takes neither a seed nor a temperature.
            params = SamplingParams(max_tokens=300, ignore_eos=True, detokenize=False)
            engine.add_request(request_id, {"prompt_token_ids": PROMPT}, params)
        for _ in range(WARM_UP):
            engine.step()
        times.clear()
        counts = [
            summary(counts_of(lambda: times.append(timed(engine.step)))) for _ in range(PASSES)
        ]
        assert engine.get_num_unfinished_requests() == n, "a request has ended: nothing is steady"
        drop(engine, ids)
        # The least of some: what else ran can only have added.
        operation = min(timed(smallest) for _ in range(PASSES)) / 1000
        least = {what: min(each[what] for each in counts) for what in COUNTED}
        found[str(n)] = {**least, "small_operations": round(min(times) / operation)}
    return found


def overhead(folder: Path, requests: Sequence[int] = REQUESTS) -> dict[str, dict[str, Any]]:
    """By side and number of requests, what a pass asks for.

    Args:
        folder: For logs, and for what is compiled.
        requests: Numbers of requests.
    """
    # Inductor is left out: it would make other kernels of the backbone's, which are in a graph.
    options = {"compilation_config": {"backend": "eager"}}
    found = {}
    with NullGpu(folder, imports="vllm") as null_gpu:
        for side, (variables, more) in SIDES.items():
            asked = [n for n in requests if side == "ours" or n <= MOST_OF_STOCK]
            outcome = null_gpu.run(
                "benchmarks.bench_pass_overhead:steady",
                model=str(SHIPPED),
                options=options | more | {"max_num_seqs": max(asked)},
                requests=asked,
                variables=variables,
                seconds=600,
            )
            found[side] = outcome.checked()
    return found


def main() -> None:
    from records import Rows, parser_of

    data = Rows(parser_of(__doc__).parse_args().data)
    with tempfile.TemporaryDirectory() as folder:
        sides = overhead(Path(folder))
    for n in map(str, REQUESTS):
        for side, found in sides.items():
            if n in found:
                data.add("overhead of a pass", requests=n, side=side, **found[n])


if __name__ == "__main__":
    main()
