"""How many experts of a layer the canvases of a pass touch: the bytes that a pass must read.

    python benchmarks/bench_routing.py FOLDER --canvases 1 8 32
    python benchmarks/bench_routing.py FOLDER --load-format dummy
    python benchmarks/bench_routing.py FOLDER --load-format dummy --awake 84

Random weights route unlike trained ones, so a speed measured with them stands beside this number.
The rows are those of real denoising steps: the router's own choice is counted in every layer.
"""

import os
import statistics
from collections import defaultdict
from typing import Any

from records import Rows, parser_of

# The engine runs in this process, where its routing can be looked at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Its log goes where the table goes.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

STEPS = 4
# Room for 64 canvases of 256.
MAX_NUM_BATCHED_TOKENS = 16384


class RoutingRecord:
    """Distinct experts chosen in each layer and pass, by the pass's number of rows."""

    def __init__(self) -> None:
        self.touched: dict[int, list[int]] = defaultdict(list)
        self.num_experts = self.top_k = 0

    def install(self) -> None:
        """Count wherever a Gemma 4 router chooses."""
        from vllm.model_executor.models.gemma4 import Gemma4Router

        original = Gemma4Router.routing_function

        def counting(router: Any, *args: Any, **kwargs: Any) -> Any:
            weights, ids = original(router, *args, **kwargs)
            self.num_experts, self.top_k = router.per_expert_scale.shape[0], ids.shape[-1]
            self.touched[ids.shape[0]].append(ids.unique().numel())
            return weights, ids

        Gemma4Router.routing_function = counting

    def even(self, num_rows: int) -> float:
        """Experts that as many rows would touch if each chose evenly and by itself."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder")
    parser.add_argument("--canvases", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--awake", type=int, help="experts that dummy routers wake; all if unset")
    parser.add_argument("--prompt-len", type=int, default=64)
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    record = RoutingRecord()
    record.install()
    llm = LLM(
        args.folder,
        load_format=args.load_format,
        # A captured or compiled pass would not call back.
        enforce_eager=True,
        max_num_seqs=max(args.canvases),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=1024,
        language_model_only=True,
        # As the options of awake_experts.py do.
        worker_extension_cls="awake_experts.WorkerExtension" if args.awake else "",
        hf_overrides={"awake_experts": args.awake} if args.awake else {},
    )
    vllm_config = llm.llm_engine.vllm_config
    canvas_length = vllm_config.diffusion_config.canvas_length
    # Words, not the ids that stand for images.
    span = vllm_config.model_config.get_vocab_size() // 2
    data = Rows(args.data)
    for count in args.canvases:
        record.touched.clear()
        llm.generate(
            [
                {"prompt_token_ids": [20 + (7919 * i + j) % span for j in range(args.prompt_len)]}
                for i in range(count)
            ],
            [
                SamplingParams(
                    max_tokens=canvas_length,
                    ignore_eos=True,
                    seed=i,
                    extra_args={"diffusion_max_steps": STEPS},
                )
                for i in range(count)
            ],
            use_tqdm=False,
        )
        rows = count * canvas_length
        touched = record.touched[rows]
        if not touched:
            raise SystemExit(f"no pass held {count} canvases of {canvas_length}; ask for fewer")
        data.add(
            "routing",
            canvases=count,
            rows=rows,
            experts=record.num_experts,
            touched=round(statistics.mean(touched), 1),
            least=min(touched),
            most=max(touched),
            if_even=round(record.even(rows), 1),
        )


if __name__ == "__main__":
    main()
