"""Train the shipped tiny pair, an autoregressive target and its DFlash draft, on a CPU, and the
LoRA with which the target drafts for itself.

    sdar="$(vllm-diffusion checkpoint --family sdar)"
    python examples/checkpoints/train_tiny_pair.py target --init "$sdar" --minutes 8 --lr 2e-3 \\
        --warm-up 40 --short-part 0.5 --threads 1 --out pair/target
    python examples/checkpoints/train_tiny_pair.py draft --target pair/target --out pair/draft
    python examples/checkpoints/train_tiny_pair.py uno --target pair/target
    vllm-diffusion bench-drafts pair/target --draft pair/draft --method dflash uno

The target begins as the tiny SDAR, whose layers are Qwen3's too and know the tasks, and learns to
say the next token. The draft begins from random weights. Both shipped ones are of these commands,
at commit a7b25cb.

Both drafts learn from the target's own greedy answers. A written answer is one up to the first
token where the target would have gone on otherwise, and is cut there, so that one pass of the
target gives both the answer and its hidden states. The LoRA learns as published: its loss is the
total variation between what a draft's row and the row that verifies it would draw.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_model import TOKEN_ID, VOCAB_SIZE, build_tokenizer, moved_in_when_complete
from tiny_qwen3 import (
    BLOCK_SIZE,
    TARGET_LAYER_IDS,
    build_target,
    load_target,
    save_target,
)
from tiny_training import (
    FAMILY_WEIGHTS,
    Row,
    add_arguments,
    batches_of,
    begin,
    optimise,
    row_stream,
)
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from vllm_diffusion.drafting.calibration.picture import draw_training
from vllm_diffusion.drafting.calibration.samples import Sample
from vllm_diffusion.drafting.calibration.train import Progress, TrainSettings, train
from vllm_diffusion.drafting.reference import (
    ReferenceDraft,
    draft_config,
    load_draft,
    save_draft,
)

# Behind the end of an answer, so that the whole of a draft's last block has something to agree
# with.
TRAILING_EOS = 8
IGNORED = -100
# What the draft learns: fewer sums, whose results nothing but the target foresees.
DRAFT_WEIGHTS = FAMILY_WEIGHTS | {"sums": 2.0, "reverse": 1.5, "upper": 1.5, "count": 2.0}
SHORT_SHARE = 0.7
ROWS_A_PASS = 32
NUM_HELD_OUT = 64
# The LoRA's, and the random tokens of one of its drafts.
LORA_RANK, LORA_ALPHA, NUM_NOISE = 16, 32, 8


def make_batch(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Conversations and what is learnt of them, both [B, T] int64: answers and what follows."""
    length = max(len(row.prompt) + len(row.response) for row in rows) + TRAILING_EOS
    ids = torch.full((len(rows), length), TOKEN_ID["<pad>"])
    labels = torch.full_like(ids, IGNORED)
    for b, (prompt, answer, _) in enumerate(rows):
        start, tokens = len(prompt), torch.tensor(answer + [TOKEN_ID["<eos>"]] * TRAILING_EOS)
        ids[b, :start] = torch.tensor(prompt)
        ids[b, start : start + len(tokens)] = tokens
        labels[b, start : start + len(tokens)] = tokens
    return ids, labels


def losses(model: Qwen3ForCausalLM, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Mean cross-entropy of the next token, in nats."""
    ids, labels = batch
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
    learnt = labels[:, 1:] != IGNORED
    logits = model.lm_head(hidden[learnt])
    return {"next": F.cross_entropy(logits.float(), labels[:, 1:][learnt])}


def train_target(args: argparse.Namespace) -> None:
    """Train the target, and write what was found."""
    begin(args)
    model = build_target() if args.init is None else load_target(args.init)
    model.train()
    optimise(
        args,
        model,
        batches_of(build_tokenizer(), args, make_batch),
        lambda batch: losses(model, batch),
        lambda average: save_target(average, args.out),
    )


@torch.no_grad()
def answers(
    target: Qwen3ForCausalLM, tokenizer, seed: int, weights: dict[str, float] = DRAFT_WEIGHTS
) -> Iterator[Sample]:
    """Endless: the target's own answers and its hidden states, those of similar length together."""
    rng = random.Random(seed)
    stream = row_stream(tokenizer, weights, ROWS_A_PASS, seed, lambda: rng.random() < SHORT_SHARE)
    for rows in stream:
        ids, _ = make_batch(rows)
        out = target.model(ids, use_cache=False, output_hidden_states=True)
        says = target.lm_head(out.last_hidden_state).argmax(-1)
        states = torch.stack([out.hidden_states[i + 1] for i in TARGET_LAYER_IDS], 2)
        for b, (prompt, answer, _) in enumerate(rows):
            end = len(prompt) + len(answer) + TRAILING_EOS
            own = ids[b, :end].clone()
            differs = (says[b, len(prompt) - 1 : end - 1] != own[len(prompt) :]).nonzero()
            if len(differs):
                end = len(prompt) + int(differs[0]) + 1
                own = own[:end]
                own[-1] = says[b, end - 2]
            yield Sample(own, states[b, :end], len(prompt))


def new_draft(target: Qwen3ForCausalLM, num_layers: int) -> ReferenceDraft:
    """A draft of the target with random weights."""
    return ReferenceDraft(
        draft_config(
            target.config,
            num_layers=num_layers,
            block_size=BLOCK_SIZE,
            mask_token_id=TOKEN_ID["<mask>"],
            target_layer_ids=TARGET_LAYER_IDS,
        )
    )


def train_draft(args: argparse.Namespace) -> None:
    """Train a draft, and draw how it went beside it."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer, target = build_tokenizer(), load_target(args.target)
    draft = new_draft(target, args.layers) if args.init is None else load_draft(args.init)
    held_out = list(itertools.islice(answers(target, tokenizer, seed=10**6), NUM_HELD_OUT))
    start = time.monotonic()

    def save() -> None:
        with moved_in_when_complete(args.out) as staging:
            save_draft(draft, staging, torch.bfloat16)

    def report(progress: Progress) -> None:
        minutes = (time.monotonic() - start) / 60
        shares = " ".join(f"{share:.2f}" for share in progress.acceptance_by_position)
        print(
            f"step {progress.step} {minutes:.1f} min: {progress.loss:.3f} nats a masked token, "
            f"{progress.accepted:.2f} of {BLOCK_SIZE - 1} accepted: {shares}",
            flush=True,
        )
        save()

    settings = TrainSettings(
        steps=args.steps,
        batch_size=ROWS_A_PASS,
        anchors=args.anchors,
        learning_rate=args.lr,
        seed=args.seed,
    )
    history = train(
        draft,
        target.get_input_embeddings(),
        target.get_output_embeddings(),
        answers(target, tokenizer, args.seed),
        settings,
        held_out=held_out,
        report=report,
    )
    save()
    args.out.with_name(args.out.name + ".training.svg").write_text(
        draw_training(history), encoding="utf-8"
    )


class Lora(nn.Module):
    """A pair of matrices on a layer, for marked rows alone.

    Attributes:
        marked: [B, T] bool, rows of a pass on which all of them act; ``None`` for none.
    """

    marked: Tensor | None = None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        down = torch.randn(LORA_RANK, layer.in_features) / layer.in_features**0.5
        self.lora_A = nn.Parameter(down)
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, LORA_RANK))
        layer.register_forward_hook(self.add)

    def add(self, _: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """A layer's output with the product."""
        if Lora.marked is None:
            return output
        product = inputs[0] @ self.lora_A.T @ self.lora_B.T
        return output + LORA_ALPHA / LORA_RANK * product * Lora.marked[..., None]


def far_apart(target: Qwen3ForCausalLM, samples: list[Sample], rng: random.Random) -> Tensor:
    """[NUM_NOISE], float32: mean total variation of each random token's row, of a draft that
    begins somewhere in each answer.
    """
    lengths = [len(one.token_ids) for one in samples]
    text = torch.full((len(samples), max(lengths) + NUM_NOISE), TOKEN_ID["<eos>"])
    for row, one in zip(text, samples, strict=True):
        row[: len(one.token_ids)] = one.token_ids
    last = [rng.randrange(one.answer_start - 1, n) for one, n in zip(samples, lengths, strict=True)]
    after = torch.arange(text.shape[1]) - torch.tensor(last)[:, None]
    is_noise = (after > 0) & (after <= NUM_NOISE)
    with torch.no_grad():
        wanted = target(text, use_cache=False).logits[is_noise].softmax(-1)
    Lora.marked = is_noise
    noisy = torch.where(is_noise, torch.randint(1, VOCAB_SIZE, text.shape), text)
    drafted = target(noisy, use_cache=False).logits[is_noise].softmax(-1)
    Lora.marked = None
    return 0.5 * (drafted - wanted).abs().sum(-1).view(-1, NUM_NOISE).mean(0)


def train_uno(args: argparse.Namespace) -> None:
    """Train the LoRA, and write it into the target's folder as PEFT would."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target = load_target(args.target).requires_grad_(False)
    layers = {n: each for n, each in target.named_modules() if isinstance(each, nn.Linear)}
    names = [name for name in layers if name != "lm_head"]
    loras = nn.ModuleList(Lora(layers[name]) for name in names)
    optimizer = torch.optim.AdamW(loras.parameters(), weight_decay=0.0)
    samples, rng = answers(target, build_tokenizer(), args.seed), random.Random(args.seed)
    for step in range(args.steps):
        far = far_apart(target, list(itertools.islice(samples, ROWS_A_PASS)), rng)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - step / args.steps) * min(1, step / 50)
        optimizer.zero_grad()
        far.mean().backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}:", *(f"{each:.3f}" for each in far), flush=True)
    tensors = {
        f"base_model.model.{name}.{half}.weight": matrix.detach().bfloat16()
        for name, lora in zip(names, loras, strict=True)
        for half, matrix in lora.named_parameters()
    }
    modules = sorted({name.rpartition(".")[2] for name in names})
    config = {"peft_type": "LORA", "target_modules": modules, "r": LORA_RANK, "bias": "none"}
    with moved_in_when_complete(args.target / "adapter") as staging:
        save_file(tensors, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config | {"lora_alpha": LORA_ALPHA}, indent=2)
        (staging / "adapter_config.json").write_text(f"{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("target")
    add_arguments(part)
    part.set_defaults(batch_size=16, minutes=8.0, run=train_target)
    part = parts.add_parser("draft")
    part.add_argument("--target", type=Path, required=True)
    part.add_argument("--init", type=Path, help="draft whose weights to start from")
    part.add_argument("--out", type=Path, required=True)
    part.add_argument("--layers", type=int, default=3)
    part.add_argument("--steps", type=int, default=420)
    part.add_argument("--anchors", type=int, default=16, help="blocks of a sample")
    part.add_argument("--lr", type=float, default=3e-3)
    part.add_argument("--threads", type=int, default=1)
    part.add_argument("--seed", type=int, default=0)
    part.set_defaults(run=train_draft)
    part = parts.add_parser("uno")
    part.add_argument("--target", type=Path, required=True)
    part.add_argument("--steps", type=int, default=2000)
    part.add_argument("--lr", type=float, default=3e-3)
    part.add_argument("--threads", type=int, default=1)
    part.add_argument("--seed", type=int, default=0)
    part.set_defaults(run=train_uno)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
