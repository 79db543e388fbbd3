"""How much noise a trained model's logits make superfluous.

    python benchmarks/bench_noise.py
    python benchmarks/bench_noise.py --block 64 --prompts 60

The shipped checkpoint answers held-out prompts of its tasks through the engine. For each row of
each step ids are counted that cannot become its candidate whatever noise they get, and blocks of
ids of which none can: those the Triton kernel leaves out. Its blocks have 1,024 ids, of 262,144;
the vocabulary here is smaller than one of them, so blocks are smaller too.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from records import Rows, parser_of
from tiny_tasks import FAMILIES, draw_question
from torch import Tensor

from attention_kernels.noise import LARGEST_NOISE, SMALLEST_NOISE
from attention_kernels.vocab_statistics import RowDraws, RowLogits, RunningStatistics, reference
from vllm_diffusion.checkpoints import shipped_checkpoint


def hopeless(rows: RowLogits, draws: RowDraws) -> Tensor:
    """[num_rows, num_ids], bool: whether no noise could make an id the candidate."""
    scores = rows.scaled(draws.temperature) / draws.rate[:, None]
    is_random = (draws.request_temperature != 0)[:, None]
    reached = scores.amax(-1, keepdim=True) + is_random * SMALLEST_NOISE
    return scores + is_random * LARGEST_NOISE < reached


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--block", type=int, default=16, help="ids")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    counted: dict[int, Tensor] = defaultdict(lambda: torch.zeros(3))
    update = reference.update_statistics

    def counting(
        running: RunningStatistics, rows: RowLogits, draws: RowDraws, *products: Tensor | None
    ) -> None:
        out = hopeless(rows, draws)
        shares = [out.float().mean(-1), in_blocks(out).float().mean(-1)]
        each = torch.stack([torch.ones(len(out)), *shares], dim=-1)
        for step in draws.step.unique().tolist():
            counted[step] += each[draws.step == step].sum(0)
        update(running, rows, draws, *products)

    def in_blocks(ids: Tensor) -> Tensor:
        """[num_rows, num_blocks], bool: blocks of which all ids are."""
        whole = ids[:, : ids.shape[1] // args.block * args.block]
        return whole.unflatten(1, (-1, args.block)).all(-1)

    rng = random.Random(0)
    questions = [
        draw_question(rng, FAMILIES[i % len(FAMILIES)], "few", held_out=True).question
        for i in range(args.prompts)
    ]
    llm = LLM(
        str(shipped_checkpoint()), max_model_len=512, max_num_seqs=8, language_model_only=True
    )
    with mock.patch.object(reference, "update_statistics", counting):
        llm.chat(
            [[{"role": "user", "content": question}] for question in questions],
            [SamplingParams(seed=i, max_tokens=64) for i in range(args.prompts)],
        )
    names = ["no noise: ids", f"blocks of {args.block}"]
    data = Rows(args.data)
    everything = torch.stack(list(counted.values())).sum(0)
    for step, (rows, *shares) in [*sorted(counted.items()), ("all", everything)]:
        cells = [f"{100 * share / rows:.1f} %" for share in shares]
        data.add("noise", step=step, rows=int(rows), **dict(zip(names, cells, strict=True)))


if __name__ == "__main__":
    main()
