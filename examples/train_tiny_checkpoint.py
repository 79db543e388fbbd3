"""Train the shipped tiny DiffusionGemma on the tasks of ``tiny_tasks.py``, on a CPU.

    python examples/train_tiny_checkpoint.py --processes 2 --threads 1 --bf16 --minutes 75 \\
        --noise-exponent 0.5 --out tiny_diffusion_gemma

Two processes of one thread are about twice as fast as one of two. Add ``--init CHECKPOINT
--short-part 0`` to train a checkpoint further. The shipped weights came from several such runs,
7,700 steps together, whose mixture, batch and step size were changed on the way; the last, of 55
minutes, had ``--lr 1.5e-3 --batch-size 16 --canvases-per-row 8 --short-part 0`` and the mixture
below. One run with the settings above has not been tried.

The objective is uniform-noise block diffusion with self-conditioning: a few response blocks
(canvases) per conversation, which share its encoder pass; t uniform in (0.001, 1); each canvas
position replaced by a uniformly random token with probability t; flat mean cross-entropy over the
whole canvas; for half of the canvases a first pass without gradients supplies self-conditioning
logits. Added to it, with weight 1, is the encoder's causal cross-entropy on the clean response.

The weights are those of ``transformers``' ``DiffusionGemmaForBlockDiffusion``; the forward pass is
written out (``TrainingForward``) because the model's own forward builds masks for one prefix
length per batch, and loops over experts. The start and the end of every run compare it with the
logits of every step inside ``generate``.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from muon import Muon
from tiny_model import (
    CANVAS_LENGTH,
    EMPTY_THOUGHT,
    TOKEN_ID,
    VOCAB_SIZE,
    build_config,
    build_tokenizer,
    save_checkpoint,
)
from tiny_tasks import FAMILIES, Example, draw_training_example, evaluation_set, is_correct
from tiny_training_forward import TrainingForward
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

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


@dataclass(frozen=True)
class Batch:
    """Right-padded token rows and the canvas to learn in each."""

    tokens: Tensor  # [B, L] int64: prompt and response up to <turn|>, then padding
    is_response: Tensor  # [B, L] bool: tokens the encoder loss predicts
    # R canvases of each row, those of one row together.
    canvas: Tensor  # [B * R, C] int64: clean canvas, filled up with <eos> after <turn|>
    canvas_start: Tensor  # [B * R] int64: position of the canvas, the number of tokens before it

    def share(self, rank: int, num_processes: int) -> Batch:
        """Every ``num_processes``-th row, of the same padded length for every process."""
        B = len(self.tokens)
        tensors = (self.tokens, self.is_response, self.canvas, self.canvas_start)
        by_row = (tensor.unflatten(0, (B, -1))[rank::num_processes] for tensor in tensors)
        return Batch(*(tensor.flatten(0, 1) for tensor in by_row))


def tokenize(tokenizer, example: Example) -> tuple[list[int], list[int]]:
    """Prompt and response token ids; the response ends with ``<turn|>``."""
    prompt = tokenizer.apply_chat_template(
        example.messages,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=bool(example.thought),
    )
    response = example.answer
    if example.thought:
        response = EMPTY_THOUGHT.replace("\n", f"\n{example.thought}\n") + response
    encode = tokenizer.backend_tokenizer.encode
    return encode(prompt).ids, [*encode(response).ids, TOKEN_ID["<turn|>"]]


def make_batch(
    rows: list[tuple[list[int], list[int]]], canvases_per_row: int, generator: torch.Generator
) -> Batch:
    """Pad the rows and choose response blocks of each, uniformly and independently."""
    length = max(len(prompt) + len(response) for prompt, response in rows)
    B, R, C = len(rows), canvases_per_row, CANVAS_LENGTH
    tokens = torch.full((B, length), TOKEN_ID["<pad>"])
    is_response = torch.zeros(B, length, dtype=torch.bool)
    canvas = torch.full((B, R, C), TOKEN_ID["<eos>"])
    canvas_start = torch.empty(B, R, dtype=torch.long)
    for b, (prompt, response) in enumerate(rows):
        ids = torch.tensor(prompt + response)
        tokens[b, : len(ids)] = ids
        is_response[b, len(prompt) : len(ids)] = True
        num_blocks = math.ceil(len(response) / C)
        for r, block in enumerate(torch.randint(num_blocks, (R,), generator=generator).tolist()):
            start = len(prompt) + block * C
            clean = ids[start : start + C]
            canvas[b, r, : len(clean)] = clean
            canvas_start[b, r] = start
    return Batch(tokens, is_response, canvas.flatten(0, 1), canvas_start.flatten())


def batches(
    tokenizer, batch_size: int, canvases_per_row: int, seed: int, is_short: Callable[[], bool]
) -> Iterator[Batch]:
    """Endless stream of batches of similar lengths; ``is_short`` chooses the curriculum's part."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    while True:
        pool = [
            tokenize(tokenizer, draw_training_example(rng, FAMILY_WEIGHTS, short=is_short()))
            for _ in range(batch_size * BATCHES_PER_POOL)
        ]
        pool.sort(key=lambda row: len(row[0]) + len(row[1]))
        starts = list(range(0, len(pool), batch_size))
        rng.shuffle(starts)
        for start in starts:
            yield make_batch(pool[start : start + batch_size], canvases_per_row, generator)


def losses(
    forward: TrainingForward, batch: Batch, noise_exponent: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Diffusion loss over the canvas and causal loss over the response, in nats per token.

    Args:
        forward: The model.
        batch: What to learn.
        noise_exponent: Below 1, more canvases are mostly noise: t is a uniform number to this power.
    """
    forward.prepare()
    hidden, cache = forward.encode(batch.tokens)
    causal = F.cross_entropy(
        forward.logits(hidden[:, :-1][batch.is_response[:, 1:]]),
        batch.tokens[:, 1:][batch.is_response[:, 1:]],
    )

    num_canvases, C = batch.canvas.shape
    t = 0.001 + 0.999 * torch.rand(num_canvases, 1) ** noise_exponent
    noise = torch.randint(VOCAB_SIZE, (num_canvases, C))
    noisy = torch.where(torch.rand(num_canvases, C) < t, noise, batch.canvas)
    row = torch.arange(num_canvases) * len(batch.tokens) // num_canvases
    # One half of the canvases gets a self-conditioning signal.
    half = num_canvases // 2
    order = torch.randperm(num_canvases)
    halves = []
    for chosen in (order[:half], order[half:]):
        keys_values = [(k[row[chosen]], v[row[chosen]]) for k, v in cache]
        halves.append((noisy[chosen], batch.canvas_start[chosen], keys_values))
    with torch.no_grad():
        seen = forward.decode(*halves[0])
    # In `generate` the signal comes from logits divided by the step's temperature.
    temperature = 0.4 + 0.4 * torch.rand(half, 1, 1)
    with_signal = forward.decode(*halves[0], seen / temperature)
    without = forward.decode(*halves[1])
    logits = torch.cat([with_signal, without])
    return F.cross_entropy(logits.flatten(0, 1), batch.canvas[order].flatten()), causal


def check_against_generate(model: DiffusionGemmaForBlockDiffusion, tokenizer) -> float:
    """Largest difference between ``TrainingForward`` and the logits of every step of ``generate``.

    Runs two prompts of different lengths through ``generate`` for three canvases each, and all their
    steps again in padded batches.

    Raises:
        AssertionError: If any logit differs by more than rounding.
    """
    forward = TrainingForward(model)
    steps: list[dict] = []
    original = model.forward

    def recording(**kwargs):
        out = original(**kwargs)
        steps.append(
            {
                "canvas": kwargs["decoder_input_ids"][0],
                "start": int(kwargs["decoder_position_ids"][0, 0]),
                "signal": kwargs["self_conditioning_logits"],
                "logits": out.logits[0],
            }
        )
        return out

    rows: list[tuple[Tensor, dict]] = []
    for question in ("Hi", "Add up: 1+2, 3+4, 5+6, 7+8, 9+10. " * 3):
        example = Example("sums", question, "")
        prompt = torch.tensor([tokenize(tokenizer, example)[0]])
        model.forward = recording
        steps.clear()
        try:
            out = model.generate(
                prompt, max_new_tokens=3 * CANVAS_LENGTH, max_denoising_steps=3, eos_token_id=None
            )
        finally:
            del model.forward
        rows += [(out.sequences[0], dict(step)) for step in steps]
    length = max(len(sequence) for sequence, _ in rows)
    tokens = torch.stack([F.pad(sequence, (0, length - len(sequence))) for sequence, _ in rows])
    worst = 0.0
    with torch.no_grad():
        _, cache = forward.encode(tokens)
        for with_signal in (False, True):
            idx = [i for i, (_, s) in enumerate(rows) if (s["signal"] is not None) == with_signal]
            logits = forward.decode(
                torch.stack([rows[i][1]["canvas"] for i in idx]),
                torch.tensor([rows[i][1]["start"] for i in idx]),
                [(k[idx], v[idx]) for k, v in cache],
                torch.cat([rows[i][1]["signal"] for i in idx]) if with_signal else None,
            )
            expected = torch.stack([rows[i][1]["logits"] for i in idx])
            worst = max(worst, (logits - expected).abs().max().item())
    assert worst < 1e-3, f"training forward differs from generate by {worst:.2e}"
    return worst


def evaluate(
    model: DiffusionGemmaForBlockDiffusion, tokenizer, num_prompts: int
) -> dict[str, tuple[float, list[tuple[str, str]]]]:
    """Share of exact answers by ``generate`` on held-out prompts, and some wrong ones."""
    report = {}
    for family in FAMILIES:
        wrong = []
        for example in evaluation_set(family, num_prompts):
            prompt, _ = tokenize(tokenizer, example)
            out = model.generate(torch.tensor([prompt]), max_new_tokens=6 * CANVAS_LENGTH)
            text = tokenizer.decode(out.sequences[0, len(prompt) :], skip_special_tokens=True)
            if not is_correct(example, text):
                wrong.append((example.answer, text))
        report[family] = (1 - len(wrong) / num_prompts, wrong)
    return report


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


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not any(
        part in name for part in ("vision", "embed_tokens", "lm_head", "router")
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


def train(rank: int, args: argparse.Namespace) -> None:
    """Train in one of ``args.processes`` processes, each on its share of the rows of a batch."""
    if args.processes > 1:
        dist.init_process_group(
            "gloo", init_method=args.rendezvous, rank=rank, world_size=args.processes
        )
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    if args.init is None:
        model = DiffusionGemmaForBlockDiffusion(build_config())
    else:
        model = DiffusionGemmaForBlockDiffusion.from_pretrained(args.init)
    print(f"training forward against generate: {check_against_generate(model, tokenizer):.1e}")
    # The vision tower keeps its random weights: no task has an image.
    parameters = [p for name, p in model.named_parameters() if "vision" not in name]
    matrices = [p for name, p in model.named_parameters() if _is_hidden_matrix(name, p)]
    matrix_ids = {id(p) for p in matrices}
    others = [p for p in parameters if id(p) not in matrix_ids]
    optimizers = [
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01),
        Muon(matrices, lr=args.lr),
    ]
    ema = Ema(parameters)
    forward = TrainingForward(model)
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
        save_checkpoint(model, args.out)
        ema.swap()

    first_step, start = step, time.monotonic()
    last_report = last_snapshot = start
    sums, num_summed = torch.zeros(2), 0
    progress = 0.0
    # A resumed run draws other examples and other noise than the run it continues, and every
    # process other noise than its siblings.
    torch.manual_seed(args.seed + 1000 * step + rank)
    stream = batches(
        tokenizer,
        args.batch_size,
        args.canvases_per_row,
        args.seed + step,
        lambda: progress < args.short_part,
    )
    for whole_batch in stream:
        batch = whole_batch.share(rank, args.processes)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            diffusion, causal = losses(forward, batch, args.noise_exponent)
        (diffusion + causal).backward()
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
        sums += torch.stack([diffusion.detach(), causal.detach()]).float()
        num_summed += 1
        if rank != 0:
            continue
        now = time.monotonic()
        if now - last_report > 30:
            d, c = (sums / num_summed).tolist()
            print(
                f"step {step} {minutes:.1f} min: diffusion {d:.4f} causal {c:.4f} nats/token, "
                f"{(now - last_report) / num_summed:.2f} s/step",
                flush=True,
            )
            sums.zero_()
            num_summed, last_report = 0, now
        if now - last_snapshot > 60 * args.snapshot_minutes:
            snapshot()
            last_snapshot = now
    if rank != 0:
        return
    snapshot()
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(args.out)
    print(f"trained weights against generate: {check_against_generate(model, tokenizer):.1e}")
    if not args.eval_prompts:
        return
    for family, (share, wrong) in evaluate(model, tokenizer, args.eval_prompts).items():
        print(f"{family}: {share:.1%} exact, e.g. wrong: {wrong[:2]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--minutes", type=float, default=75.0, help="stop after so long")
    parser.add_argument("--steps", type=int, default=10**9, help="or after so many steps")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument(
        "--canvases-per-row", type=int, default=4, help="learnt from one encoded conversation"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument(
        "--noise-exponent", type=float, default=1.0, help="below 1: learn more from noisy canvases"
    )
    parser.add_argument(
        "--short-part", type=float, default=0.35, help="share of the run on short examples"
    )
    parser.add_argument("--processes", type=int, default=1, help="share each batch's rows")
    parser.add_argument("--threads", type=int, default=2, help="per process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshot-minutes", type=float, default=5.0)
    parser.add_argument("--eval-prompts", type=int, default=20, help="per family, at the end")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue from OUT.training.pt")
    start.add_argument("--init", type=Path, help="checkpoint whose weights to start from")
    parser.add_argument(
        "--bf16", action="store_true", help="matrix products in bfloat16; weights stay fp32"
    )
    args = parser.parse_args()
    if args.processes == 1:
        train(0, args)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        args.rendezvous = f"file://{directory}/rendezvous"
        torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
