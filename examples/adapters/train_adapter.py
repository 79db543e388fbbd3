"""Train a LoRA adapter with PEFT on the shipped checkpoint, in about a minute, and serve it.

    python examples/adapters/train_adapter.py --out answers_loudly --serve

The checkpoint answers "What is 7+8?" with "15"; with the adapter it answers "Answer: 15!". PEFT
adapts the encoder's and the decoder's layers, each with matrices of its own, and self-conditioning.

The objective is that of ``train_tiny_checkpoint.py``, without the encoder's own loss: each position
of the canvas is replaced by a random token with probability t, uniform in (0, 1), and all of them
are learnt; half of the steps are given the logits of a step before. Needs ``peft`` (``pip install
peft``).
"""

import argparse
import logging
import os
import random
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from vllm_diffusion.checkpoints import shipped_checkpoint

# Answers are printed, and not vLLM's log; vLLM starts its engine in a process that imports this
# file again.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

# Named as in transformers; modules of the vision tower have these names too, and are not meant.
TARGETS = (
    r"model\.(encoder\.language_model|decoder)\.layers\.\d+\."
    r"(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
    r"|model\.decoder\.self_conditioning\.(gate|up|down)_proj"
)
SERVED_AS = "loud"


def question(rng: random.Random, is_held_out: bool) -> tuple[str, str]:
    """A sum of two digits, and what the adapter is to answer."""
    while True:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        # One pair in five is never trained on.
        if ((2 * a + b) % 5 == 0) == is_held_out:
            return f"What is {a}+{b}?", f"Answer: {a + b}!"


class Tokens:
    """Text as the checkpoint reads and writes it."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.end, self.fill = self.tokenizer.convert_tokens_to_ids(["<turn|>", "<eos>"])

    def prompt(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    def canvas(self, answer: str, length: int) -> list[int]:
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.end]
        return ids + [self.fill] * (length - len(ids))


def loss_of(model, prompts: Tensor, canvases: Tensor) -> Tensor:
    """Cross-entropy of the canvases in nats per token, from noisy ones."""
    noise = torch.randint_like(canvases, model.config.text_config.vocab_size)
    is_noise = torch.rand(canvases.shape) < torch.rand(len(canvases), 1)
    noisy = torch.where(is_noise, noise, canvases)
    signal = None
    if random.random() < 0.5:
        with torch.no_grad():
            seen = model(input_ids=prompts, decoder_input_ids=noisy).logits
        # In `generate` they are divided by the step's temperature.
        signal = seen / random.uniform(0.4, 0.8)
    logits = model(
        input_ids=prompts, decoder_input_ids=noisy, self_conditioning_logits=signal
    ).logits
    return F.cross_entropy(logits.flatten(0, 1), canvases.flatten())


def share_right(model, tokens: Tokens, num_questions: int) -> float:
    """Of questions that are never trained on, by transformers' own ``generate``."""
    rng, right = random.Random(1), 0
    for _ in range(num_questions):
        asked, wanted = question(rng, is_held_out=True)
        prompt = tokens.prompt(asked)
        out = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=32)
        text = tokens.tokenizer.decode(out.sequences[0, len(prompt) :], skip_special_tokens=True)
        right += text.strip() == wanted
    return right / num_questions


def train(args: argparse.Namespace) -> None:
    """Train for ``args.seconds``, and save the adapter in ``args.out``."""
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    # These matrices are too small to share, and threads on busy cores wait for one another.
    torch.set_num_threads(1)
    checkpoint = shipped_checkpoint()
    tokens = Tokens(checkpoint)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(checkpoint)
    length = model.config.canvas_length
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    model.print_trainable_parameters()
    print(f"before: {share_right(model, tokens, args.questions):.0%} right", flush=True)

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.0)
    rng, start, step, losses = random.Random(args.seed), time.monotonic(), 0, []
    last_report = start
    while (now := time.monotonic()) < start + args.seconds:
        pairs = [question(rng, is_held_out=False) for _ in range(args.batch_size)]
        # Numbers of one digit: prompts of one length, which need no padding.
        prompts = torch.tensor([tokens.prompt(asked) for asked, _ in pairs])
        canvases = torch.tensor([tokens.canvas(wanted, length) for _, wanted in pairs])
        loss = loss_of(model, prompts, canvases)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * max(0.05, 1 - (now - start) / args.seconds)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        losses.append(loss.item())
        if now > last_report + 10:
            print(f"step {step}, {now - start:.0f} s: {sum(losses) / len(losses):.3f} nats/token")
            losses, last_report = [], now
    print(f"step {step}: {sum(losses) / max(len(losses), 1):.3f} nats/token")
    print(f"after: {share_right(model, tokens, args.questions):.0%} right", flush=True)
    model.save_pretrained(args.out)
    print(
        f"\nvllm serve {checkpoint} --enable-lora --max-lora-rank 8 \\\n"
        f"  --lora-modules {SERVED_AS}={args.out.resolve()}\n"
        f'and requests say "model": "{SERVED_AS}".'
    )


def serve(adapter: Path) -> None:
    """A few questions with and without the adapter, in one batch."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        str(shipped_checkpoint()),
        max_model_len=1024,
        max_num_seqs=8,
        enable_lora=True,
        max_lora_rank=8,
        use_tqdm_on_load=False,
    )
    asked = ["What is 7+8?", "What is 4+2?", "What is 3+9?"]
    requests = [None, LoRARequest(SERVED_AS, 1, str(adapter.resolve()))]
    work = [(text, request) for text in asked for request in requests]
    outputs = llm.chat(
        [[{"role": "user", "content": text}] for text, _ in work],
        SamplingParams(max_tokens=32, seed=0),
        lora_request=[request for _, request in work],
        use_tqdm=False,
    )
    for (text, request), output in zip(work, outputs, strict=True):
        name = "the checkpoint" if request is None else request.lora_name
        print(f"{text} -> {name}: {output.outputs[0].text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--questions", type=int, default=20, help="asked before and after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help="answer a few questions with vLLM")
    args = parser.parse_args()
    train(args)
    if args.serve:
        serve(args.out)


if __name__ == "__main__":
    main()
