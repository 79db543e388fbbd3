"""What the training scripts of the shipped checkpoints have in common.

The stream of tokenized examples, the learning rate, and the loop around a model's own losses. The
shipped weights are older than this loop: theirs, at commit a7b25cb, had a Muon of its own.
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from tiny_model import EMPTY_THOUGHT, TOKEN_ID
from tiny_tasks import Example, draw_training_example
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class Row(NamedTuple):
    """Token ids of a prompt and of the response to it."""

    prompt: list[int]
    response: list[int]
    # How many tokens at the response's end are given too, as the text after a missing one is.
    num_given: int = 0


# What a model's own losses read.
Batch = TypeVar("Batch")

FAMILY_WEIGHTS = {
    "sums": 3.0,
    "reverse": 1.0,
    "upper": 1.0,
    "json": 1.2,
    "count": 4.0,
    "list": 1.8,
    "prose": 0.2,
    "chat": 0.2,
}
# Batches are cut from this many examples sorted by length, so that rows waste little padding.
BATCHES_PER_POOL = 12
EMA_DECAY = 0.995


def tokenize(tokenizer, example: Example) -> Row:
    """Prompt and response; the response ends with ``<turn|>``, or where a result or a suffix
    does.
    """
    encode = tokenizer.backend_tokenizer.encode
    if example.suffix:
        suffix = encode(example.suffix).ids
        return Row(encode(example.question).ids, encode(example.answer).ids + suffix, len(suffix))
    prompt = tokenizer.apply_chat_template(
        example.messages,
        tools=list(example.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=bool(example.thought),
    )
    response = example.answer
    if example.thought:
        response = EMPTY_THOUGHT.replace("\n", f"\n{example.thought}\n") + response
    # The published model hands over to the tool by the token that opens the result.
    end = TOKEN_ID["<|tool_response>" if example.is_call else "<turn|>"]
    return Row(encode(prompt).ids, [*encode(response).ids, end])


def row_stream(
    tokenizer,
    weights: dict[str, float],
    batch_size: int,
    seed: int,
    is_short: Callable[[], bool],
) -> Iterator[list[Row]]:
    """Endless stream of rows of similar lengths; ``is_short`` chooses the curriculum's part."""
    rng = random.Random(seed)
    while True:
        pool = [
            tokenize(tokenizer, draw_training_example(rng, weights, short=is_short()))
            for _ in range(batch_size * BATCHES_PER_POOL)
        ]
        pool.sort(key=lambda row: len(row.prompt) + len(row.response))
        starts = list(range(0, len(pool), batch_size))
        rng.shuffle(starts)
        for start in starts:
            yield pool[start : start + batch_size]


def batches_of(
    tokenizer,
    args: argparse.Namespace,
    make: Callable[[list[Row]], Batch],
    weights: dict[str, float] = FAMILY_WEIGHTS,
) -> Callable[[Callable[[], bool]], Iterator[Batch]]:
    """The ``batches`` of :func:`optimise`, made of rows of ``args.batch_size``."""

    def batches(is_short: Callable[[], bool]) -> Iterator[Batch]:
        return map(make, row_stream(tokenizer, weights, args.batch_size, args.seed, is_short))

    return batches


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    # Muon takes matrices alone: neither filters of a convolution nor stacks of experts.
    return parameter.ndim == 2 and not any(
        part in name for part in ("vision", "embed_tokens", "lm_head", "router", "classifier")
    )


def _averaged(average: Tensor, now: Tensor, num_averaged: Tensor) -> Tensor:
    # A young average would remember the random start: the decay grows to its final value.
    decay = min(EMA_DECAY, (1 + int(num_averaged)) / (10 + int(num_averaged)))
    return average.lerp(now, 1 - decay)


def learning_rate(args: argparse.Namespace, step: int, progress: float) -> float:
    """Linear warm-up in steps, then cosine decay to a twentieth over the run."""
    warm_up = min(1.0, (step + 1) / args.warm_up)
    return args.lr * warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def optimise(
    args: argparse.Namespace,
    model: nn.Module,
    batches: Callable[[Callable[[], bool]], Iterator[Batch]],
    losses: Callable[[Batch], dict[str, Tensor]],
    save: Callable[[nn.Module], None],
) -> None:
    """Train until ``args.minutes`` or ``args.steps`` are over; save an average of the weights.

    Args:
        args: Of :func:`add_arguments`.
        model: Its hidden matrices are stepped by Muon, the other parameters by AdamW.
        batches: Endless batches, from a switch that says whether examples are short still.
        losses: Named losses of one batch in nats per token; their sum is minimised.
        save: Writes such a model's weights as a checkpoint.
    """
    # A vision tower keeps its random weights: no task has an image.
    parameters = {name: p for name, p in model.named_parameters() if "vision" not in name}
    matrices = [p for name, p in parameters.items() if _is_hidden_matrix(name, p)]
    others = [p for name, p in parameters.items() if not _is_hidden_matrix(name, p)]
    optimizers = [
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01),
        # With the root mean square of an Adam step, so that one learning rate serves both.
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    ]
    average = AveragedModel(model, avg_fn=_averaged)
    start = last_report = last_save = time.monotonic()
    sums: dict[str, float] = {}
    num_summed = 0
    progress = 0.0
    stream = batches(lambda: progress < args.short_part)
    for step, batch in enumerate(stream):
        minutes = (time.monotonic() - start) / 60
        progress = max(minutes / args.minutes, step / args.steps)
        if progress >= 1:
            break
        with torch.autocast(others[0].device.type, torch.bfloat16, enabled=args.bf16):
            named = losses(batch)
        sum(named.values()).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(args, step, progress)
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)
        for name, loss in named.items():
            sums[name] = sums.get(name, 0.0) + loss.item()
        num_summed += 1
        now = time.monotonic()
        if now - last_report > 30:
            means = " ".join(f"{name} {total / num_summed:.4f}" for name, total in sums.items())
            print(
                f"step {step + 1} {minutes:.1f} min: {means} nats/token, "
                f"{(now - last_report) / num_summed:.2f} s/step",
                flush=True,
            )
            sums.clear()
            num_summed, last_report = 0, now
        if now - last_save > 60 * args.save_minutes:
            save(average.module)
            last_save = now
    save(average.module)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`optimise` and :func:`begin`."""
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--init", type=Path, help="checkpoint whose weights to start from")
    parser.add_argument("--minutes", type=float, default=75.0, help="stop after so long")
    parser.add_argument("--steps", type=int, default=10**9, help="or after so many steps")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument(
        "--short-part", type=float, default=0.35, help="share of the run on short examples"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument(
        "--bf16", action="store_true", help="matrix products in bfloat16; weights stay fp32"
    )


def begin(args: argparse.Namespace) -> None:
    """Threads and seed of a run, and the folder above what it writes."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
