"""What the training scripts of the shipped checkpoints have in common.

The stream of tokenized examples, the optimizers, the learning rate, the average of the weights that
is saved, and the loop around a model's own losses.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from tiny_model import EMPTY_THOUGHT, TOKEN_ID
from tiny_tasks import Example, draw_training_example
from torch import Tensor, nn


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


def shares_of(
    tokenizer, args: argparse.Namespace, rank: int, make: Callable[[list[Row]], Batch]
) -> Callable[[int, Callable[[], bool]], Iterator[Batch]]:
    """The ``batches`` of :func:`optimise` for a process that takes every ``args.processes``-th row.

    Args:
        tokenizer: The checkpoint's.
        args: Of :func:`add_arguments`.
        rank: Of this process.
        make: Makes a batch of rows.
    """

    def batches(seed: int, is_short: Callable[[], bool]) -> Iterator[Batch]:
        for rows in row_stream(tokenizer, FAMILY_WEIGHTS, args.batch_size, seed, is_short):
            yield make(rows[rank :: args.processes])

    return batches


class Ema:
    """Exponential moving average of the trained parameters, which is what gets saved."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.parameters = parameters
        self.average = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        # A young average would remember the random start: the decay grows to its final value.
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange parameters and average; call again to go back."""
        for p, a in zip(self.parameters, self.average, strict=True):
            kept = p.detach().clone()
            p.copy_(a)
            a.copy_(kept)


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz iterations, for matrices and stacks of them.

    The step has the RMS of an Adam step, so one learning rate serves both optimizers. On this model
    it needs about half the steps that AdamW does.

    Source: K. Jordan et al., "Muon: an optimizer for hidden layers" (2024); the step size is that
    of arXiv:2502.16982, section 2.2.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(state["momentum"], group["momentum"])
                by_shape.setdefault(p.shape[-2:], []).append((p, update))
            for (rows, columns), pairs in by_shape.items():
                # Matrices of one shape, from whatever layer or expert, are one batch.
                stack = torch.cat([update.reshape(-1, rows, columns) for _, update in pairs])
                stack = _orthogonalise(stack) * (0.2 * max(rows, columns) ** 0.5)
                parts = stack.split([update.numel() // (rows * columns) for _, update in pairs])
                for (p, _), part in zip(pairs, parts, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(part.view_as(p), alpha=-group["lr"])


def _orthogonalise(x: Tensor) -> Tensor:
    """Nearest orthogonal matrices, roughly: singular values of [N, R, C] come close to 1."""
    wide = x.mT if x.shape[1] > x.shape[2] else x
    # In float32: processors without bfloat16 of their own take seven times as long for it.
    y = wide
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.mT if x.shape[1] > x.shape[2] else y


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    # Not the filters of a convolution.
    return parameter.ndim in (2, 3) and not any(
        part in name for part in ("vision", "embed_tokens", "lm_head", "router", "classifier")
    )


def learning_rate(args: argparse.Namespace, step: int, progress: float) -> float:
    """Linear warm-up in steps, then cosine decay to a twentieth over the run."""
    warm_up = min(1.0, (step + 1) / args.warm_up)
    return args.lr * warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def average_over_processes(parameters: list[torch.nn.Parameter], progress: float) -> float:
    """Average the gradients in place, and the progress, so that every process takes one step."""
    if not dist.is_initialized():
        return progress
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([torch.tensor([progress]), *(g.flatten() for g in grads)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat[1:].split([g.numel() for g in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))
    return float(flat[0])


def optimise(
    rank: int,
    args: argparse.Namespace,
    model: nn.Module,
    batches: Callable[[int, Callable[[], bool]], Iterator],
    losses: Callable[..., dict[str, Tensor]],
    save: Callable[[], None],
) -> None:
    """Train until ``args.minutes`` or ``args.steps`` are over; process 0 saves the averaged
    weights.

    Args:
        rank: Of this process.
        args: Of :func:`add_arguments`.
        model: Its hidden matrices are stepped by Muon, the other parameters by AdamW.
        batches: From a seed and the curriculum's switch, this process's share of every batch.
        losses: Named losses of one batch in nats per token; their sum is minimised.
        save: Writes the model's present weights as a checkpoint.
    """
    # A vision tower keeps its random weights: no task has an image.
    parameters = [p for name, p in model.named_parameters() if "vision" not in name]
    matrices = [p for name, p in model.named_parameters() if _is_hidden_matrix(name, p)]
    matrix_ids = {id(p) for p in matrices}
    others = [p for p in parameters if id(p) not in matrix_ids]
    optimizers = [
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01),
        Muon(matrices, lr=args.lr),
    ]
    ema = Ema(parameters)
    state_path = args.out.with_name(args.out.name + ".training.pt")
    step = 0
    if args.resume:
        state = torch.load(state_path, weights_only=True)
        with torch.no_grad():
            for p, saved in zip(parameters, state["parameters"], strict=True):
                p.copy_(saved)
        ema.average = state["ema"]
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step = state["step"]

    def snapshot() -> None:
        partial = state_path.with_suffix(".partial")
        torch.save(
            {
                "parameters": [p.detach() for p in parameters],
                "ema": ema.average,
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
            },
            partial,
        )
        partial.replace(state_path)
        ema.swap()
        save()
        ema.swap()

    first_step, start = step, time.monotonic()
    last_report = last_snapshot = start
    sums: dict[str, float] = {}
    num_summed = 0
    progress = 0.0
    # A resumed run draws other examples and other noise than the run it continues, and every
    # process other noise than its siblings.
    torch.manual_seed(args.seed + 1000 * step + rank)
    stream = batches(args.seed + step, lambda: progress < args.short_part)
    for batch in stream:
        with torch.autocast(parameters[0].device.type, torch.bfloat16, enabled=args.bf16):
            named = losses(batch)
        sum(named.values()).backward()
        minutes = (time.monotonic() - start) / 60
        progress = max(minutes / args.minutes, (step - first_step) / args.steps)
        progress = average_over_processes(parameters, progress)
        if progress >= 1:
            break
        lr = learning_rate(args, step - first_step, progress)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        ema.update(step)
        step += 1
        for name, loss in named.items():
            sums[name] = sums.get(name, 0.0) + loss.item()
        num_summed += 1
        if rank != 0:
            continue
        now = time.monotonic()
        if now - last_report > 30:
            means = " ".join(f"{name} {total / num_summed:.4f}" for name, total in sums.items())
            print(
                f"step {step} {minutes:.1f} min: {means} nats/token, "
                f"{(now - last_report) / num_summed:.2f} s/step",
                flush=True,
            )
            sums.clear()
            num_summed, last_report = 0, now
        if now - last_snapshot > 60 * args.snapshot_minutes:
            snapshot()
            last_snapshot = now
    if rank == 0:
        snapshot()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`optimise` and :func:`launch`."""
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--minutes", type=float, default=75.0, help="stop after so long")
    parser.add_argument("--steps", type=int, default=10**9, help="or after so many steps")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument(
        "--short-part", type=float, default=0.35, help="share of the run on short examples"
    )
    parser.add_argument("--processes", type=int, default=1, help="share each batch's rows")
    parser.add_argument("--threads", type=int, default=2, help="per process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshot-minutes", type=float, default=5.0)
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue from OUT.training.pt")
    start.add_argument("--init", type=Path, help="checkpoint whose weights to start from")
    parser.add_argument(
        "--bf16", action="store_true", help="matrix products in bfloat16; weights stay fp32"
    )


def launch(train: Callable[[int, argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Call ``train`` with rank and ``args`` in each of ``args.processes`` processes."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.processes == 1:
        train(0, args)
        return
    with tempfile.TemporaryDirectory() as directory:
        args.rendezvous = f"file://{directory}/rendezvous"
        torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)


def begin(rank: int, args: argparse.Namespace) -> None:
    """Join the other processes; threads and seed of this one."""
    if args.processes > 1:
        dist.init_process_group(
            "gloo", init_method=args.rendezvous, rank=rank, world_size=args.processes
        )
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
