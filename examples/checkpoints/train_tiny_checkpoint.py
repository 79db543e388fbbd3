"""Train the shipped tiny DiffusionGemma on the tasks of ``tiny_tasks.py``, on a CPU or a GPU.

    python examples/checkpoints/train_tiny_checkpoint.py --bf16 --minutes 75 --noise-exponent 0.5 \\
        --out tiny_diffusion_gemma

Add ``--init CHECKPOINT --short-part 0`` to train a checkpoint further, and ``--keep 0.25`` to leave
it a share in the weights. The shipped weights came from several such runs on CPUs, 7,700 steps
together, whose mixture, batch and step size were changed on the way. What they say of greetings and
of the weather came later: 1,180 steps of 32 conversations on an H200, where a step took 0.16 s
(``--short-part 0 --lr 1.5e-3 --batch-size 32 --canvases-per-row 8 --noise-exponent 0.7``), between
runs of 920 and 1,460 steps of 12 and 16 on one core, the last of them with ``--lr 5e-4``. The
families ``json-asked`` and ``fill`` came last, in 660 steps of 24 and 1,200 of 16 with ``--lr``
6e-4 to 3e-4 and ``--keep 0.25``: the old tasks, of which sums had fallen to 95.7 %, are at what
they were with it, and of the new ones nothing is lost. One run with the settings above has not been
tried. ``--bf16`` is for processors that multiply in bfloat16: on others a step takes ten times as
long with it.

The objective is uniform-noise block diffusion with self-conditioning: a few response blocks
(canvases) per conversation, which share its encoder pass; t uniform in (0.001, 1); each canvas
position replaced by a uniformly random token with probability t; flat mean cross-entropy over the
whole canvas; half of the canvases are given the logits of a first pass without gradients, as
self-conditioning. Added to it, with weight 1, is the encoder's causal cross-entropy on the clean
response.

Encoder and decoder are those of ``transformers``' ``DiffusionGemmaForBlockDiffusion``, with masks
for rows of different lengths. ``evaluate.py --checkpoint`` scores what was written.
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tiny_model import (
    CANVAS_LENGTH,
    TOKEN_ID,
    VOCAB_SIZE,
    build_config,
    build_tokenizer,
    save_checkpoint,
)
from tiny_training import (
    FAMILY_WEIGHTS,
    Row,
    add_arguments,
    batches_of,
    begin,
    optimise,
)
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The other shipped models have no later families in theirs.
MIXTURE = FAMILY_WEIGHTS | {
    "chat": 1.0,
    "sums": 4.0,
    "reverse": 3.0,
    "upper": 2.0,
    "weather": 6.0,
    "json-asked": 4.0,
    "fill": 4.0,
}


@dataclass(frozen=True)
class Batch:
    """Right-padded token rows and the canvas to learn in each."""

    tokens: Tensor  # [B, L] int64: prompt and response up to <turn|>, then padding
    is_response: Tensor  # [B, L] bool: tokens the encoder loss predicts
    # R canvases of each row, those of one row together.
    canvas: Tensor  # [B * R, C] int64: clean canvas, filled up with <eos> after <turn|>
    canvas_start: Tensor  # [B * R] int64: position of the canvas, the number of tokens before it
    is_given: Tensor  # [B * R, C] bool: what stays as it is, the text after a missing one


def make_batch(rows: list[Row], canvases_per_row: int) -> Batch:
    """Pad the rows and choose response blocks of each, uniformly and independently."""
    length = max(len(row.prompt) + len(row.response) for row in rows)
    B, R, C = len(rows), canvases_per_row, CANVAS_LENGTH
    tokens = torch.full((B, length), TOKEN_ID["<pad>"])
    is_response = torch.zeros(B, length, dtype=torch.bool)
    canvas = torch.full((B, R, C), TOKEN_ID["<eos>"])
    canvas_start = torch.empty(B, R, dtype=torch.long)
    is_given = torch.zeros(B, R, C, dtype=torch.bool)
    for b, (prompt, response, num_given) in enumerate(rows):
        ids = torch.tensor(prompt + response)
        tokens[b, : len(ids)] = ids
        is_response[b, len(prompt) : len(ids)] = True
        is_given[b, :, len(response) - num_given : len(response)] = num_given > 0
        num_blocks = math.ceil(len(response) / C)
        for r, block in enumerate(torch.randint(num_blocks, (R,)).tolist()):
            start = len(prompt) + block * C
            clean = ids[start : start + C]
            canvas[b, r, : len(clean)] = clean
            canvas_start[b, r] = start
    return Batch(
        *(tokens, is_response, canvas.flatten(0, 1)),
        *(canvas_start.flatten(), is_given.flatten(0, 1)),
    )


def encode(model: DiffusionGemmaForBlockDiffusion, tokens: Tensor) -> tuple[Tensor, DynamicCache]:
    """Hidden states [B, L, H] of the causal pass, and keys and values of every position.

    Padding on the right is harmless to what stands before it. The cache has no configuration, so
    that sliding layers keep what is out of the window of a row's end, but not of its canvases.
    """
    out = model.model.encoder(input_ids=tokens, past_key_values=DynamicCache())
    return out.last_hidden_state, out.past_key_values


def decode(
    model: DiffusionGemmaForBlockDiffusion,
    canvas: Tensor,
    canvas_start: Tensor,
    cache: DynamicCache,
    seen_before: Tensor | None = None,
    has_signal: Tensor | None = None,
) -> Tensor:
    """One denoising pass: logits [N, C, vocab], fp32.

    Args:
        model: The model.
        canvas: [N, C] int64, noisy tokens.
        canvas_start: [N] int64; canvas n sees the cached keys before ``canvas_start[n]`` (on
            sliding layers the last ``sliding_window - 1`` of them) and itself.
        cache: Of N rows.
        seen_before: [N, C, vocab], the logits of the step before divided by its temperature.
        has_signal: [N] bool: which canvases are given them.
    """
    L, C = cache.get_seq_length(), canvas.shape[1]
    start, key = canvas_start[:, None], torch.arange(L + C)
    before, own = key < start, key >= L
    in_window = key > start - model.config.text_config.sliding_window
    visible = {"full_attention": before | own, "sliding_attention": before & in_window | own}
    hidden = model.model.decoder(
        decoder_input_ids=canvas,
        past_key_values=cache,
        self_conditioning_logits=seen_before,
        self_conditioning_mask=has_signal,
        decoder_attention_mask={
            kind: keys[:, None, None].expand(-1, 1, C, -1) for kind, keys in visible.items()
        },
        decoder_position_ids=start + torch.arange(C),
    ).last_hidden_state
    return logits_of(model, hidden)


def logits_of(model: DiffusionGemmaForBlockDiffusion, hidden: Tensor) -> Tensor:
    """Softcapped logits of hidden states [..., H]."""
    cap = model.config.text_config.final_logit_softcapping
    # Rounded logits would blur the confidence that the stopping rule asks for.
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(model.lm_head(hidden.float()) / cap) * cap


def losses(
    model: DiffusionGemmaForBlockDiffusion, batch: Batch, noise_exponent: float = 1.0
) -> dict[str, Tensor]:
    """Diffusion loss over the canvas and causal loss over the response, in nats per token.

    Args:
        model: The model.
        batch: What to learn.
        noise_exponent: Below 1, more canvases are mostly noise: t is a uniform number to this
            power.
    """
    hidden, cache = encode(model, batch.tokens)
    causal = F.cross_entropy(
        logits_of(model, hidden[:, :-1][batch.is_response[:, 1:]]),
        batch.tokens[:, 1:][batch.is_response[:, 1:]],
    )

    num_canvases, C = batch.canvas.shape
    t = 0.001 + 0.999 * torch.rand(num_canvases, 1) ** noise_exponent
    noise = torch.randint(VOCAB_SIZE, (num_canvases, C))
    is_noise = (torch.rand(num_canvases, C) < t) & ~batch.is_given
    noisy = torch.where(is_noise, noise, batch.canvas)
    cache.batch_repeat_interleave(num_canvases // len(batch.tokens))
    with torch.no_grad():
        seen = decode(model, noisy, batch.canvas_start, cache)
    # In `generate` the signal comes from logits divided by the step's temperature.
    temperature = 0.4 + 0.4 * torch.rand(num_canvases, 1, 1)
    has_signal = torch.rand(num_canvases) < 0.5
    logits = decode(model, noisy, batch.canvas_start, cache, seen / temperature, has_signal)
    diffusion = F.cross_entropy(logits.flatten(0, 1), batch.canvas.flatten())
    return {"diffusion": diffusion, "causal": causal}


def train(args: argparse.Namespace) -> None:
    """Train, and write what was found."""
    begin(args)
    torch.set_default_device(DEVICE)
    if args.init is None:
        model = DiffusionGemmaForBlockDiffusion(build_config()).eval()
    else:
        model = DiffusionGemmaForBlockDiffusion.from_pretrained(args.init)
    model = model.to(DEVICE)
    optimise(
        args,
        model,
        batches_of(
            build_tokenizer(), args, lambda rows: make_batch(rows, args.canvases_per_row), MIXTURE
        ),
        lambda batch: losses(model, batch, args.noise_exponent),
        lambda average: save_checkpoint(average, args.out),
    )
    if args.keep:
        keep_share(model, args)


@torch.no_grad()
def keep_share(model: DiffusionGemmaForBlockDiffusion, args: argparse.Namespace) -> None:
    """Save the mean of what a run began from and what it found: old tasks come back, new ones
    stay.
    """
    begun, found = (
        DiffusionGemmaForBlockDiffusion.from_pretrained(folder) for folder in (args.init, args.out)
    )
    for p, a, b in zip(model.parameters(), begun.parameters(), found.parameters(), strict=True):
        p.copy_(b.lerp(a, args.keep))
    save_checkpoint(model, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_arguments(parser)
    parser.add_argument(
        "--canvases-per-row", type=int, default=4, help="learnt from one encoded conversation"
    )
    parser.add_argument(
        "--noise-exponent", type=float, default=1.0, help="below 1: learn more from noisy canvases"
    )
    parser.add_argument(
        "--keep", type=float, default=0.0, help="share of --init's weights in the result's"
    )
    args = parser.parse_args()
    if args.keep and args.init is None:
        parser.error("--keep needs --init, whose weights it keeps a share of")
    train(args)


if __name__ == "__main__":
    main()
