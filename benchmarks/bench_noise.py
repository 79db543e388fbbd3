"""How much of the candidates' noise a trained model's logits make superfluous, by denoise step.

    python benchmarks/bench_noise.py
    python benchmarks/bench_noise.py --block 64 --prompts 60

The shipped checkpoint answers held-out prompts of its tasks through the engine. For each row of each step
ids are counted that cannot become its candidate whatever noise they get, and blocks of ids of which none
can: those the Triton kernel leaves out. Its blocks have 1,024 ids, of 262,144; the vocabulary here
is smaller than one of them, so blocks are smaller too.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from tiny_tasks import FAMILIES, draw_question

from attention_kernels.noise import LARGEST_NOISE, SMALLEST_NOISE
from attention_kernels.vocab_statistics import RowDraws, RowLogits, RunningStatistics, reference
from vllm_diffusion.cli.checkpoint import shipped_checkpoint


def hopeless(rows: RowLogits, draws: RowDraws) -> Tensor:
    """[num_rows, num_ids], bool: whether no noise could make an id the candidate."""
    scores = rows.scaled(draws.temperature) / draws.rate[:, None]
    is_random = (draws.request_temperature != 0)[:, None]
    reached = scores.amax(-1, keepdim=True) + is_random * SMALLEST_NOISE
    return scores + is_random * LARGEST_NOISE < reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
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
        whole = out[:, : out.shape[1] // args.block * args.block]
        blocks = whole.unflatten(1, (-1, args.block)).all(-1)
        for step in draws.step.unique().tolist():
            at = draws.step == step
            shares = [out[at].float().mean(-1).sum(), blocks[at].float().mean(-1).sum()]
            counted[step] += torch.stack([at.sum().float(), *shares])
        update(running, rows, draws, *products)

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
    print(f"step     rows  ids without noise  blocks of {args.block} without")
    for step, (rows, ids, blocks) in sorted(counted.items()):
        print(f"{step:4} {int(rows):8} {ids / rows:17.1%} {blocks / rows:20.1%}")
    rows, ids, blocks = torch.stack(list(counted.values())).sum(0)
    print(f" all {int(rows):8} {ids / rows:17.1%} {blocks / rows:20.1%}")


if __name__ == "__main__":
    main()
