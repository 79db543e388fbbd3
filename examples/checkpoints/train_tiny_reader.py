"""Train a tiny MinerU-Diffusion to read pages of digits that Pillow draws, on a CPU.

    python examples/checkpoints/train_tiny_reader.py --threads 1 --out tiny_mineru
    vllm serve tiny_mineru --port 8000
    python examples/documents.py --lines 60 17283 4096

The package ships its weights: ``vllm-diffusion checkpoint --family mineru``.

A page is a square with one to three lines of one to five digits, whose place and size vary a
little. The objective is that of ``train_tiny_sdar.py``: copies of an answer's block, in each of
which a uniformly drawn share is masked, see the prompt with its picture and themselves. Until the
tower tells digits apart nothing else can be learnt, so a classifier that is not saved says for each
token of a picture which digit is in its middle. In the end it reads pages of another seed by the
published rule, at temperature 0.

The shipped weights took 350 steps with ``--bf16`` (19 minutes of a busy core) and some 2,000 more
with ``--init``, ``--short-part 0`` and ``--minutes 38``. They read 296 of 300 such pages exactly:
99, 100 and 97 of those with one, two and three lines, in 1.1 steps a page.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from tiny_model import TOKEN_ID, build_tokenizer, moved_in_when_complete
from tiny_qwen3 import ROPE, ROPE_THETA, SIZES, TOKENS
from tiny_training import add_arguments, begin, optimise
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    PatchMerger,
    Qwen2VisionTransformerPretrainedModel,
)

BLOCK_LENGTH, THRESHOLD = 32, 0.95
MASK_ID, END_ID, FILL_ID = TOKEN_ID["<mask>"], TOKEN_ID["<turn|>"], TOKEN_ID["<eos>"]
# In their publisher's words, each of them a token here, so that a prompt is little more than its
# picture.
SYSTEM, TASK = "You are a helpful assistant.", "\nText Recognition:"
# A picture is 6 x 6 tokens of 16 x 16 pixels, whatever its size was.
PATCH, MERGE, SIDE = 8, 2, 96
CELLS = SIDE // (PATCH * MERGE)
# As ``examples/documents.py`` draws it.
PAGE, FONT, SPACING = 480, 140, 20

TEXT = SIZES | {"hidden_size": 96, "intermediate_size": 256}
VISION = {
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": TEXT["hidden_size"],
    "mlp_ratio": 2,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
PICTURES = {
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "min_pixels": SIDE**2,
    "max_pixels": SIDE**2,
}
CONFIG = {
    **TOKENS,
    "architectures": ["MinerUDiffusionForConditionalGeneration"],
    "model_type": "mineru_diffusion",
    "image_token_id": TOKEN_ID["<|image|>"],
    "mask_token_id": MASK_ID,
    "vision_projector_type": f"patch_merger{MERGE}x",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "text_config": {
        **TEXT,
        **TOKENS,
        "model_type": "sdar",
        "use_cache": False,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "torch_dtype": "float32",
    },
    "vision_config": {"model_type": "qwen2_vl", **VISION},
}
GENERATION_CONFIG = TOKENS | {"eos_token_id": [FILL_ID, END_ID], "temperature": 0.0}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|turn>' -}}
  {%- if message['content'] is string -%}{{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- else -%}<|image|>{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<turn|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>' -}}{%- endif -%}
"""
# From the names of the modules here to the published ones.
PUBLISHED = {"tower.": "vision_model.", "projector.": "vision_abstractor.projection."}


class Reader(nn.Module):
    """The modules of MinerU-Diffusion, and the classifier of the training."""

    def __init__(self) -> None:
        super().__init__()
        vision = Qwen2VLVisionConfig(**VISION)
        self.tower = Qwen2VisionTransformerPretrainedModel(vision)
        self.tower.merger = nn.Identity()
        self.projector = PatchMerger(TEXT["hidden_size"], vision.embed_dim, MERGE)
        text = Qwen3Config(**TEXT, rope_parameters=ROPE, use_cache=False)
        self.language_model = Qwen3ForCausalLM(text)
        # Ten digits, and none.
        self.classifier = nn.Linear(TEXT["hidden_size"], 11)

    def forward(self, ids: Tensor, position: Tensor, visible: Tensor, features: Tensor) -> Tensor:
        """Hidden states before the head, [B, T, hidden].

        Args:
            ids: Tokens, [B, T] int64.
            position: Their positions in the sequence, [T] int64.
            visible: Which token sees which, [T, T] bool.
            features: Of :meth:`look`, [B, CELLS**2, hidden].
        """
        embeds = self.language_model.get_input_embeddings()(ids)
        at = ids == TOKEN_ID["<|image|>"]
        embeds = embeds.masked_scatter(at[..., None], features.to(embeds.dtype))
        return self.language_model.model(
            inputs_embeds=embeds,
            attention_mask=visible.expand(len(ids), 1, -1, -1),
            position_ids=position.expand(len(ids), -1),
            use_cache=False,
        ).last_hidden_state

    def look(self, pages: list[Image.Image]) -> Tensor:
        """Tokens of pages, [num_pages, CELLS**2, hidden]."""
        made = Qwen2VLImageProcessorPil(**PICTURES)(images=pages, return_tensors="pt")
        patches = self.tower(made["pixel_values"], made["image_grid_thw"]).last_hidden_state
        return self.projector(patches).unflatten(0, (len(pages), CELLS**2))

    def save(self, directory: Path) -> None:
        """Write a checkpoint with the published names, each file moved in when complete."""
        tensors = {
            next(
                (
                    new + name.removeprefix(old)
                    for old, new in PUBLISHED.items()
                    if name.startswith(old)
                ),
                name,
            ): tensor.contiguous()
            for name, tensor in self.state_dict().items()
            if not name.startswith("classifier.")
        }
        files: dict[str, Any] = {"config": CONFIG, "generation_config": GENERATION_CONFIG}
        files["preprocessor_config"] = {"image_processor_type": "Qwen2VLImageProcessor", **PICTURES}
        with moved_in_when_complete(directory) as staging:
            save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
            tokenizer().save_pretrained(staging)
            for name, content in files.items():
                (staging / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")

    def load(self, directory: Path) -> None:
        """Read the weights of :meth:`save`."""
        own = {}
        for name, tensor in load_file(directory / "model.safetensors").items():
            for new, old in PUBLISHED.items():
                if name.startswith(old):
                    name = new + name.removeprefix(old)
            own[name] = tensor
        self.load_state_dict(own, strict=False)


def tokenizer() -> Any:
    """The shipped checkpoints', with the publisher's words and a template that is little else."""
    made = build_tokenizer((SYSTEM, TASK))
    made.chat_template = CHAT_TEMPLATE
    return made


@dataclass(frozen=True)
class Page:
    """A drawn page.

    Attributes:
        picture: Of ``SIDE`` x ``SIDE`` pixels.
        text: Its lines.
        cells: [CELLS**2] int64: the digit in the middle of each token of the picture, 10 where
            there is none.
    """

    picture: Image.Image
    text: str
    cells: Tensor


def draw_page(rng: random.Random, num_lines: int) -> Page:
    """Draw lines of digits, whose place and size vary by a few pixels."""
    lines = ["".join(rng.choices("0123456789", k=rng.randint(1, 5))) for _ in range(num_lines)]
    size = FONT * rng.uniform(0.95, 1.04)
    left, top = rng.uniform(10, 50), rng.uniform(-20, 20)
    picture = Image.new("L", (PAGE, PAGE), "white")
    draw = ImageDraw.Draw(picture)
    draw.multiline_text((left, top), "\n".join(lines), "black", font_size=size, spacing=SPACING)
    cells = torch.full((CELLS, CELLS), 10)
    for row, line in enumerate(lines):
        for at, digit in enumerate(line):
            # Digits are equally wide. This one's middle is in one column, and its halves may be in
            # two rows.
            upto = "\n".join(["0"] * row + ["0" * (at + 1)])
            box = draw.multiline_textbbox((left, top), upto, font_size=size, spacing=SPACING)
            x = int((box[2] - 0.28 * size) * CELLS / PAGE)
            for height in (0.15, 0.55):
                y = int((box[3] - height * size) * CELLS / PAGE)
                cells[min(y, CELLS - 1), min(x, CELLS - 1)] = int(digit)
    # As the processor of pictures does it.
    picture = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB")
    return Page(picture, "\n".join(lines), cells.flatten())


@dataclass(frozen=True)
class Batch:
    """Pages, each behind the same prompt, and noised copies of their answers' blocks."""

    pages: list[Page]
    ids: Tensor  # [B, T] int64
    position: Tensor  # [T] int64
    visible: Tensor  # [T, T] bool: row sees column
    masked: Tensor  # [B, T] bool: what is learnt
    target: Tensor  # [masked.sum()] int64


class Prompts:
    """The prompt with a picture, and what its tokens and blocks after it see."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()
        parts = [{"type": "image"}, {"type": "text", "text": TASK}]
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        text = text.replace("<|image|>", "<|image|>" * CELLS**2)
        self.ids = torch.tensor(self.tokenizer.backend_tokenizer.encode(text).ids)

    def layout(self, num_copies: int) -> tuple[Tensor, Tensor]:
        """Positions and visibility of a prompt with copies of the block after it."""
        length = len(self.ids)
        copy = torch.arange(num_copies).repeat_interleave(BLOCK_LENGTH) + 1
        copy = torch.cat([torch.zeros(length, dtype=torch.long), copy])
        after = torch.arange(BLOCK_LENGTH).repeat(num_copies) + length
        position = torch.cat([torch.arange(length), after])
        # Counted from the end of the prompt.
        block = (position - length).div(BLOCK_LENGTH, rounding_mode="floor")
        in_prompt = (copy[None, :] == 0) & (block[None, :] <= block[:, None])
        return position, in_prompt | (copy[None, :] == copy[:, None]) & (copy[:, None] > 0)


def make_batch(prompts: Prompts, pages: list[Page], num_copies: int) -> Batch:
    """Noise ``num_copies`` copies of each page's answer."""
    ids, masks, targets = [], [], []
    position, visible = prompts.layout(num_copies)
    for page in pages:
        answer = [*prompts.tokenizer.backend_tokenizer.encode(page.text).ids, END_ID]
        block = torch.full((BLOCK_LENGTH,), FILL_ID)
        block[: len(answer)] = torch.tensor(answer)
        blocks = block.repeat(num_copies, 1)
        ratio, draws = torch.rand(num_copies, 1), torch.rand(num_copies, BLOCK_LENGTH)
        # A copy is all masks, as each first step finds it.
        ratio[0] = 1.0
        mask = draws <= torch.maximum(ratio, draws.min(-1, keepdim=True).values)
        targets.append(blocks[mask])
        ids.append(torch.cat([prompts.ids, blocks.masked_fill(mask, MASK_ID).flatten()]))
        masks.append(torch.cat([torch.zeros(len(prompts.ids), dtype=torch.bool), mask.flatten()]))
    return Batch(pages, torch.stack(ids), position, visible, torch.stack(masks), torch.cat(targets))


def losses(model: Reader, batch: Batch) -> dict[str, Tensor]:
    """Mean cross-entropies in nats: of the masked tokens, and of the classifier."""
    features = model.look([page.picture for page in batch.pages])
    cells = torch.stack([page.cells for page in batch.pages])
    # Most of a page is blank.
    weight = torch.tensor([1.0] * 10 + [0.1])
    seen = F.cross_entropy(
        model.classifier(features).flatten(0, 1).float(), cells.flatten(), weight
    )
    hidden = model(batch.ids, batch.position, batch.visible, features)
    logits = model.language_model.lm_head(hidden[batch.masked])
    return {"diffusion": F.cross_entropy(logits.float(), batch.target), "cells": seen}


@torch.no_grad()
def read(model: Reader, prompts: Prompts, page: Page) -> tuple[list[int], int]:
    """Read a page by the published rule at temperature 0; return its tokens up to the end, and the
    number of steps.
    """
    features = model.look([page.picture])
    position, visible = prompts.layout(1)
    block = torch.full((BLOCK_LENGTH,), MASK_ID)
    num_steps = 0
    while (masked := block == MASK_ID).any():
        num_steps += 1
        ids = torch.cat([prompts.ids, block])[None]
        hidden = model(ids, position, visible, features)[0, -BLOCK_LENGTH:]
        logits = model.language_model.lm_head(hidden)
        logits[:, MASK_ID] = float("-inf")
        confidence, tokens = logits.softmax(-1).max(-1)
        confidence = confidence.masked_fill(~masked, -1.0)
        reveal = confidence > THRESHOLD
        reveal[confidence.argmax()] = True
        block[reveal] = tokens[reveal]
    answer = block.tolist()
    ends = [at + 1 for at, token in enumerate(answer) if token in (END_ID, FILL_ID)]
    return answer[: min(ends, default=None)], num_steps


def evaluate(model: Reader, num_pages: int) -> str:
    """Read pages that no training has drawn but by chance."""
    prompts, rng = Prompts(), random.Random("held out")
    right, steps, digits = [0] * 4, 0, [0, 0]
    for number in range(num_pages):
        page = draw_page(rng, number % 3 + 1)
        tokens, num_steps = read(model, prompts, page)
        text = prompts.tokenizer.decode(tokens, skip_special_tokens=True)
        right[number % 3 + 1] += text == page.text
        digits[0] += sum(a == b for a, b in zip(text, page.text, strict=False))
        digits[1] += len(page.text)
        steps += num_steps
    return (
        f"{sum(right)} of {num_pages} pages read exactly ({right[1]}, {right[2]} and {right[3]} of those with one, two "
        f"and three lines), {digits[0]} of {digits[1]} characters; {steps / num_pages:.1f} steps a page"
    )


def train(args: argparse.Namespace) -> None:
    """Train, write what was found, and read pages with it."""
    begin(args)
    model, prompts = Reader(), Prompts()
    if args.init is not None:
        model.load(args.init)

    def batches(is_short: Callable[[], bool]) -> Iterator[Batch]:
        rng = random.Random(args.seed)
        while True:
            most = 1 if is_short() else 3
            pages = [draw_page(rng, rng.randint(1, most)) for _ in range(args.batch_size)]
            yield make_batch(prompts, pages, args.copies)

    optimise(
        args,
        model,
        batches,
        lambda batch: losses(model, batch),
        lambda average: average.save(args.out),
    )
    model.load(args.out)
    print(evaluate(model.eval(), args.num_pages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_arguments(parser)
    parser.add_argument("--copies", type=int, default=2, help="noised copies of each answer")
    parser.add_argument("--num-pages", type=int, default=300, help="held-out pages that are read")
    parser.set_defaults(batch_size=16, minutes=20.0, threads=1, lr=3e-3, short_part=0.15)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
