"""Train the LoRA with which the shipped tiny target drafts for itself (Uno), on a CPU.

    python examples/checkpoints/train_tiny_uno.py --out pair/uno
    vllm-diffusion bench-drafts --draft uno=pair/uno

As published, the loss is the total variation between what a draft's row and the row that verifies
it would draw. The target's own greedy answers are the text; a draft begins at a token of one.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_model import TOKEN_ID, VOCAB_SIZE, build_tokenizer, moved_in_when_complete
from tiny_qwen3 import load_target
from torch import Tensor, nn
from train_tiny_pair import ROWS_A_PASS, answers
from transformers import Qwen3ForCausalLM

from vllm_diffusion.checkpoints import shipped_checkpoint

RANK, ALPHA = 16, 32
# Random tokens of a draft, and drafts of an answer that are learnt at a time.
NOISE, ANCHORS = 8, 8


class Lora(nn.Module):
    """A pair of matrices on a layer, for marked rows alone."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))
        self.marked: Tensor | None = None
        layer.register_forward_hook(self.add)

    def add(self, layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Return a layer's output, with the product if rows are marked."""
        if self.marked is None:
            return output
        product = inputs[0] @ self.down.T @ self.up.T
        return output + ALPHA / RANK * product * self.marked[..., None]


def drafts_of(batch: list[Tensor], starts: list[int]) -> tuple[Tensor, ...]:
    """Lay out answers, each with drafts after them.

    Returns:
        Token ids and positions, [B, T] int64; which rows a row sees, [B, T, T] bool; which are
        random, [T] bool; and by draft the row before it, [B, ANCHORS] int64.
    """
    length = max(map(len, batch))
    total, rows = length + ANCHORS * NOISE, torch.arange(length + ANCHORS * NOISE)
    ids = torch.randint(1, VOCAB_SIZE, (len(batch), total))
    anchor = torch.zeros(len(batch), ANCHORS, dtype=torch.long)
    for b, (tokens, start) in enumerate(zip(batch, starts, strict=True)):
        ids[b, :length] = TOKEN_ID["<pad>"]
        ids[b, : len(tokens)] = tokens
        # A draft's last row is held to a row of the answer.
        anchor[b] = torch.randint(start, max(len(tokens) - NOISE, start + 1), (ANCHORS,))
    draft = (rows - length).div(NOISE, rounding_mode="floor")
    is_noise = draft >= 0
    before = torch.where(is_noise, anchor[:, draft.clamp(min=0)], -1)
    positions = torch.where(is_noise, before + 1 + (rows - length) % NOISE, rows)
    sees_text = ~is_noise & (rows <= torch.where(is_noise, before, rows)[..., None])
    own = (draft[:, None] == draft) & is_noise & (rows <= rows[:, None])
    return ids, positions, sees_text | own, is_noise, anchor


def distance(target: Qwen3ForCausalLM, loras: nn.ModuleList, batch: list[Tensor], starts) -> Tensor:
    """[NOISE], the mean total variation of each row of a draft."""
    ids, positions, visible, is_noise, anchor = drafts_of(batch, starts)
    for lora in loras:
        lora.marked = is_noise.float()
    bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    logits = target(
        ids, attention_mask=bias[:, None], position_ids=positions, use_cache=False
    ).logits
    for lora in loras:
        lora.marked = None
    drafted = logits[:, is_noise].view(len(batch), ANCHORS, NOISE, -1).softmax(-1)
    at = anchor[..., None] + 1 + torch.arange(NOISE)
    each = torch.arange(len(batch))[:, None, None]
    wanted = logits.detach()[each, at.clamp(max=int((~is_noise).sum()) - 1)].softmax(-1)
    return 0.5 * (drafted - wanted).abs().sum(-1).mean((0, 1))


def save(loras: nn.ModuleList, names: list[str], folder: Path) -> None:
    """Write the adapter as PEFT does."""
    tensors = {
        f"base_model.model.{name}.lora_{half}.weight": matrix.detach().bfloat16().contiguous()
        for name, lora in zip(names, loras, strict=True)
        for half, matrix in (("A", lora.down), ("B", lora.up))
    }
    config = {
        "peft_type": "LORA",
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
    }
    with moved_in_when_complete(folder) as staging:
        save_file(tensors, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        (staging / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, default=shipped_checkpoint("qwen3"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target = load_target(args.target).requires_grad_(False).eval()
    target.config._attn_implementation = "eager"
    samples = answers(target, build_tokenizer(), args.seed)
    names = [n for n, layer in target.model.named_modules() if isinstance(layer, nn.Linear)]
    loras = nn.ModuleList(Lora(target.model.get_submodule(name)) for name in names)
    optimizer = torch.optim.AdamW(loras.parameters(), lr=args.lr, weight_decay=0.0)
    start, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        batch = list(islice(samples, ROWS_A_PASS))
        texts, starts = [one.token_ids for one in batch], [one.answer_start - 1 for one in batch]
        far = distance(target, loras, texts, starts)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - done) * min(1, (step + 1) / 50)
        optimizer.zero_grad()
        far.mean().backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} {60 * done * args.minutes:.0f} s:", *(f"{x:.3f}" for x in far))
            save(loras, [f"model.{name}" for name in names], args.out)
        step, done = step + 1, (time.monotonic() - start) / 60 / args.minutes
    save(loras, [f"model.{name}" for name in names], args.out)


if __name__ == "__main__":
    main()
