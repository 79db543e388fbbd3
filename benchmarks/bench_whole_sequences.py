"""Tokens a second and passes of LLaDA's layers, with the publisher's own loop on the same weights.

    VLLM_DIFFUSION_PUBLISHERS=FOLDER python benchmarks/bench_whole_sequences.py
    VLLM_DIFFUSION_PUBLISHERS=FOLDER python benchmarks/bench_whole_sequences.py --peer dlmserve \\
        --peer-python PATH

FOLDER is that of ``tests/publishers``. The weights are random, and the answers are compared.
Requests are alike in length, so that the publisher's batch has no padding. With ``--peer`` two
servers are asked over HTTP on one core; PATH is a Python with dlmserve 0.1.1, transformers 4.53.3
and torch.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from records import Rows, parser_of

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from timing import place

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", choices=("dlmserve",), help="a server beside ours")
    parser.add_argument("--peer-python", type=Path, help="its Python")
    parser.add_argument("--steps", nargs="+", type=int, default=[32, 128], help="with --peer")
    args = parser.parse_args()
    if args.peer:
        if not args.peer_python or "VLLM_DIFFUSION_PUBLISHERS" not in os.environ:
            parser.error("--peer needs --peer-python, and VLLM_DIFFUSION_PUBLISHERS to be set")
        from served_beside_dlmserve import measure

        cells = [(clients, steps) for steps in args.steps for clients in args.requests]
        measure(Rows(args.data), cells, args.rounds, args.peer_python.absolute())
    else:
        beside_generate(args)
    print(place())


def beside_generate(args: Any) -> None:
    """Add a row for each number of requests, ours and the publisher's loop on one batch."""
    import torch
    from vllm import LLM, SamplingParams

    from tests.publishers.llada import llada, model_and_loop
    from tests.support.families import makers as tiny
    from tests.support.families.model import MASK_ID, prompt_of

    toy = tiny.llada(**SIZES)
    model, generate = model_and_loop(llada(toy))
    rows, B = Rows(args.data), 32
    params = SamplingParams(
        temperature=0,
        max_tokens=args.output_len,
        ignore_eos=True,
        detokenize=False,
        extra_args={
            "diffusion_block_length": B,
            "diffusion_max_steps": B,
            "diffusion_strategy": "static",
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(str(toy.save(Path(folder) / "model")), max_model_len=1024, max_num_seqs=8)
        for num_requests in args.requests:
            prompts = [prompt_of(args.prompt_len, seed=i) for i in range(num_requests)]

            def ours(prompts: list[list[int]] = prompts) -> list[list[int]]:
                asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
                outputs = llm.generate(asked, params, use_tqdm=False)
                return [list(output.outputs[0].token_ids) for output in outputs]

            def published(prompts: list[list[int]] = prompts) -> list[list[int]]:
                ids = generate(
                    model,
                    torch.tensor(prompts),
                    steps=args.output_len,
                    gen_length=args.output_len,
                    block_length=B,
                    mask_id=MASK_ID,
                )
                return [row[args.prompt_len :] for row in ids.tolist()]

            is_equal = ours() == published()
            seconds: dict[str, list[float]] = {"ours": [], "published": []}
            for _ in range(args.rounds):
                for side, run in (("ours", ours), ("published", published)):
                    began = time.perf_counter()
                    run()
                    seconds[side].append(time.perf_counter() - began)
            ratios = [p / o for o, p in zip(seconds["ours"], seconds["published"], strict=True)]
            num_tokens = num_requests * args.output_len
            rows.add(
                "whole sequences",
                requests=num_requests,
                passes=args.output_len,
                tokens_a_second=round(num_tokens / statistics.median(seconds["ours"]), 1),
                published=round(num_tokens / statistics.median(seconds["published"]), 1),
                ratio=round(statistics.median(ratios), 2),
                same_tokens=is_equal,
            )


if __name__ == "__main__":
    main()
