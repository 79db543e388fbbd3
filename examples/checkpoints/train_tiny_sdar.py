"""Train the shipped tiny SDAR on the tasks of ``tiny_tasks.py``, on a CPU.

    python examples/checkpoints/train_tiny_sdar.py --threads 1 --bf16 --compile --lr 3e-3 --out
    tiny_sdar

The shipped weights are those after some 5,000 steps, in two runs whose processes shared their core:
1,478 steps with these settings, then 45 minutes with ``--init`` on their weights, ``--minutes 45
--warm-up 20 --short-part 0.3``.

The objective is masked block diffusion. The conversation, cut into blocks from its first token,
goes through the model clean, with noised copies of its answer's blocks at its side: a noised block
sees itself and the clean blocks before it, a clean block the clean blocks up to itself, so one pass
learns every block under the cache it will find. In a noised block each position behind the prompt
is masked with a probability drawn uniformly per block, what is left of the prompt is not, and the
loss is the mean cross-entropy of the masked tokens. Behind ``<turn|>`` the last block is filled
with ``<eos>``. ``evaluate.py --checkpoint`` scores what was written.
"""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tiny_model import TOKEN_ID, build_tokenizer
from tiny_sdar import (
    BLOCK_LENGTH,
    MASK_ID,
    build_model,
    hidden_states,
    load_model,
    save_checkpoint,
)
from tiny_training import Row, add_arguments, batches_of, begin, optimise
from torch import Tensor
from transformers import Qwen3ForCausalLM


@dataclass(frozen=True)
class Batch:
    """Noised copies of answers beside the clean conversations, right-padded.

    T counts the clean tokens and those of every copy.
    """

    ids: Tensor  # [B, T] int64
    position: Tensor  # [B, T] int64, in the conversation
    visible: Tensor  # [B, T, T] bool: row sees column
    masked: Tensor  # [B, T] bool: what is learnt
    target: Tensor  # [masked.sum()] int64: the tokens under the masks, in row order


def make_batch(rows: list[Row], copies: int) -> Batch:
    """Fill the rows up to whole blocks and noise ``copies`` copies of each one's answer blocks."""
    C, eos = BLOCK_LENGTH, TOKEN_ID["<eos>"]
    whole = [
        (len(prompt) // C * C, -(-(len(prompt) + len(answer)) // C) * C)
        for prompt, answer, _ in rows
    ]
    length = max(end + copies * (end - start) for start, end in whole)
    B = len(rows)
    ids = torch.full((B, length), TOKEN_ID["<pad>"])
    position = torch.zeros(B, length, dtype=torch.long)
    # 0: clean; 1, 2, ...: that copy; -1: padding, which sees padding alone and is seen by nothing
    # else.
    copy = torch.full((B, length), -1)
    masked = torch.zeros(B, length, dtype=torch.bool)
    targets = []
    for b, ((prompt, answer, _), (start, end)) in enumerate(zip(rows, whole, strict=True)):
        clean = torch.full((end,), eos)
        clean[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        ids[b, :end] = clean
        position[b, :end] = torch.arange(end)
        copy[b, :end] = 0
        for number in range(copies):
            here = slice(end + number * (end - start), end + (number + 1) * (end - start))
            mask = noise(end - start, len(prompt) - start)
            noised = clean[start:].clone()
            targets.append(noised[mask])
            noised[mask] = MASK_ID
            ids[b, here] = noised
            position[b, here] = torch.arange(start, end)
            copy[b, here] = number + 1
            masked[b, here] = mask
    block = position // C
    row_copy, column_copy = copy[:, :, None], copy[:, None, :]
    row_block, column_block = block[:, :, None], block[:, None, :]
    earlier = (column_copy == 0) & (column_block < row_block) & (row_copy >= 0)
    itself = (column_copy == row_copy) & (column_block == row_block)
    return Batch(ids, position, earlier | itself, masked, torch.cat(targets))


def noise(length: int, remainder: int) -> Tensor:
    """What is masked of whole blocks, [length] bool; never the prompt's ``remainder`` before it.

    Each block's share of masks is uniform in (0, 1). A block without one gets one.
    """
    ratio = torch.rand(length // BLOCK_LENGTH, 1)
    draws = torch.rand(length // BLOCK_LENGTH, BLOCK_LENGTH)
    draws.view(-1)[:remainder] = 2.0
    return (draws <= torch.maximum(ratio, draws.min(-1, keepdim=True).values)).flatten()


def losses(model: Qwen3ForCausalLM, batch: Batch) -> dict[str, Tensor]:
    """Mean cross-entropy of the masked tokens, in nats per token."""
    hidden = hidden_states(model, batch.ids, batch.position, batch.visible)
    logits = model.lm_head(hidden[batch.masked])
    return {"diffusion": F.cross_entropy(logits.float(), batch.target)}


def train(args: argparse.Namespace) -> None:
    """Train, and write what was found."""
    begin(args)
    model = build_model() if args.init is None else load_model(args.init)
    model.train()
    if args.compile:
        model.model.compile(dynamic=True)
    optimise(
        args,
        model,
        batches_of(build_tokenizer(), args, lambda rows: make_batch(rows, args.copies)),
        lambda batch: losses(model, batch),
        lambda average: save_checkpoint(average, args.out),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_arguments(parser)
    parser.add_argument(
        "--copies", type=int, default=3, help="noised copies of each answer in one pass"
    )
    parser.add_argument(
        "--compile", action="store_true", help="1.4 times as fast; needs a C++ compiler"
    )
    parser.set_defaults(batch_size=16, minutes=38.0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
