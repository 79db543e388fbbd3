"""Score a tiny checkpoint on held-out prompts: ``transformers`` and vLLM side by side.

    python examples/checkpoints/evaluate.py --num-prompts 100
    python examples/checkpoints/evaluate.py --engine vllm --families sums json
    python examples/checkpoints/evaluate.py --engine vllm --settings '{"preset": "fast"}'
    sdar="$(vllm-diffusion checkpoint --family sdar)"
    python examples/checkpoints/evaluate.py --engine vllm --checkpoint "$sdar"
    python examples/checkpoints/evaluate.py --compare fp8=FOLDER nvfp4=FOLDER

For each checkable family of ``tiny_tasks.py``: exact match with its 95 % Wilson interval, and the
mean number of denoise steps per canvas. Both engines get the same token ids and the sampling
settings of the checkpoint's ``generation_config.json``; their random draws differ.

``--compare`` runs ``--checkpoint`` and quantised copies of it (``quantize.py``) through vLLM
instead, and prints what quantising costs (``format_comparison.py``).

``transformers`` answers one prompt at a time, so that nothing is padded. SDAR has no ``generate``
there: the loop in ``tiny_sdar.py`` over ``transformers``' Qwen3 answers, without a cache.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from format_comparison import Distribution, FormatRun, table, wilson_interval
from tiny_tasks import (
    FAMILIES,
    FILL_FAMILY,
    LATER_FAMILIES,
    Example,
    Size,
    evaluation_set,
    is_correct,
)

from vllm_diffusion.checkpoints import shipped_checkpoint

# Longer than any answer: six canvases of 32 tokens, 24 blocks of 8.
MAX_NEW_TOKENS = 192
# Vocabularies up to this size are compared whole.
SMALL_VOCABULARY = 1000
# Text prompts only: the engine need not set memory aside for images.
NO_IMAGES = {"image": 0, "video": 0}


@dataclass(frozen=True)
class Answer:
    """What an engine returned for one prompt."""

    text: str
    num_canvases: int
    # Denoising passes over all canvases; None where the engine does not report them.
    num_denoise_steps: int | None


class TransformersEngine:
    """The oracle, in fp32 on this machine: ``DiffusionGemmaForBlockDiffusion.generate``, or SDAR's
    loop over ``transformers``' Qwen3.
    """

    name = "transformers"

    def __init__(self, checkpoint: Path, *, seed: int, threads: int | None):
        import torch
        from tiny_sdar import load_model
        from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self.is_sdar = config["architectures"] == ["SDARForCausalLM"]
        load = load_model if self.is_sdar else DiffusionGemmaForBlockDiffusion.from_pretrained
        self.model = load(checkpoint)

    def answer(self, prompts: list[list[int]]) -> list[Answer]:
        """Answers to ``prompts`` (token ids), one after another: nothing is padded."""
        return [self._sdar(p) if self.is_sdar else self._diffusion_gemma(p) for p in prompts]

    def _sdar(self, prompt: list[int]) -> Answer:
        from tiny_sdar import generate

        found = generate(self.model, prompt, MAX_NEW_TOKENS)
        text = self.tokenizer.decode(found.tokens, skip_special_tokens=True)
        return Answer(text, found.num_blocks, found.num_steps)

    def _diffusion_gemma(self, prompt: list[int]) -> Answer:
        import torch

        out = self.model.generate(torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS)
        settings = self.model.generation_config
        tokens = out.sequences[0, len(prompt) :].tolist()
        # `generate` reports non-padding tokens per pass; turn that back into passes.
        num_counted = sum(token != settings.pad_token_id for token in tokens)
        ends = [i + 1 for i, token in enumerate(tokens) if token in settings.eos_token_id]
        tokens = tokens[: min(ends, default=None)]
        return Answer(
            self.tokenizer.decode(tokens, skip_special_tokens=True),
            math.ceil(len(tokens) / self.model.config.canvas_length),
            round(num_counted / out.tokens_per_forward[0].item()),
        )


class VllmEngine:
    """Stock vLLM with this package's plugin, offline."""

    name = "vllm"

    def __init__(
        self, checkpoint: Path, *, seed: int, settings: dict[str, Any], max_logprobs: int = 20
    ):
        from vllm import LLM

        self.llm = LLM(
            model=str(checkpoint),
            seed=seed,
            limit_mm_per_prompt=NO_IMAGES,
            max_logprobs=max_logprobs,
            additional_config={"diffusion": settings},
        )
        self.canvas_length = self.llm.llm_engine.model_config.hf_config.canvas_length

    def answer(self, prompts: list[list[int]]) -> list[Answer]:
        """Answers in the order of ``prompts`` (token ids)."""
        sampling = self.llm.get_default_sampling_params()
        sampling.max_tokens = MAX_NEW_TOKENS
        return self._answer(prompts, sampling)

    def fill(self, examples: list[Example]) -> list[Answer]:
        """What is missing in texts, which has as many tokens as the right answer."""
        encode = self.llm.get_tokenizer().encode
        sampling = []
        for example in examples:
            own = self.llm.get_default_sampling_params()
            own.max_tokens = len(encode(example.answer, add_special_tokens=False))
            own.extra_args = {"diffusion_suffix": example.suffix}
            sampling.append(own)
        prompts = [encode(example.question, add_special_tokens=False) for example in examples]
        return self._answer(prompts, sampling)

    def _answer(self, prompts: list[list[int]], sampling: Any) -> list[Answer]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        return [self._read(output.outputs[0]) for output in outputs]

    def first_steps(self, prompts: list[list[int]], num_logprobs: int) -> list[list[Distribution]]:
        """Each position's distribution after one denoise step, from the same canvas every time."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                max_tokens=self.canvas_length,
                ignore_eos=True,
                seed=idx,
                logprobs=num_logprobs,
                extra_args={"diffusion_max_steps": 1},
            )
            for idx in range(len(prompts))
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        return [
            [
                {token: entry.logprob for token, entry in position.items()}
                for position in output.outputs[0].logprobs
            ]
            for output in outputs
        ]

    def close(self) -> None:
        """End the engine's process, so that another can have its memory."""
        self.llm.llm_engine.engine_core.shutdown()

    def _read(self, completion) -> Answer:
        from vllm_diffusion.metrics import request_metrics

        metrics = request_metrics(completion)
        if metrics is None:
            num_canvases = math.ceil(len(completion.token_ids) / self.canvas_length)
            return Answer(completion.text, max(1, num_canvases), None)
        steps = metrics.denoise_steps_per_canvas
        return Answer(completion.text, len(steps), sum(steps))


def prompt_token_ids(tokenizer, example: Example) -> list[int]:
    """The chat as the template writes it, up to where the answer begins."""
    return tokenizer.apply_chat_template(
        example.messages,
        tools=list(example.tools) or None,
        add_generation_prompt=True,
        return_dict=False,
    )


def score(
    engine, tokenizer, family: str, num_prompts: int, seed: int, size: Size | None = None
) -> str:
    """Run one family through one engine; return the line of its score."""
    examples = evaluation_set(family, num_prompts, seed, size)
    start = time.monotonic()
    if family == FILL_FAMILY:
        answers = engine.fill(examples)
    else:
        answers = engine.answer([prompt_token_ids(tokenizer, example) for example in examples])
    seconds = time.monotonic() - start
    num_right = sum(is_correct(e, a.text) for e, a in zip(examples, answers, strict=True))
    low, high = wilson_interval(num_right, num_prompts)
    steps = "n/a"
    if all(answer.num_denoise_steps is not None for answer in answers):
        num_canvases = sum(answer.num_canvases for answer in answers)
        num_steps = sum(answer.num_denoise_steps or 0 for answer in answers)
        steps = f"{num_steps / num_canvases:.2f}"
    return (
        f"{family:<8} {engine.name:<12} {num_right / num_prompts:6.1%} "
        f"[{low:.1%}, {high:.1%}] of {num_prompts}  steps/canvas {steps:>5}  {seconds:.0f} s"
    )


def run_format(name: str, checkpoint: Path, args: argparse.Namespace) -> FormatRun:
    """One checkpoint through vLLM on the prompts of every chosen family."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    examples = [
        example
        for family in args.families
        for example in evaluation_set(family, args.num_prompts, args.seed)
    ]
    prompts = [prompt_token_ids(tokenizer, example) for example in examples]
    # All of a small vocabulary; of a large one, what the engine gives.
    num_logprobs = -1 if len(tokenizer) <= SMALL_VOCABULARY else 20
    engine = VllmEngine(
        checkpoint, seed=args.seed, settings=args.settings, max_logprobs=num_logprobs
    )
    answers = engine.answer(prompts)
    every = max(1, len(prompts) // args.first_step_prompts)
    first_steps = engine.first_steps(prompts[::every], num_logprobs)
    engine.close()
    num_canvases = sum(answer.num_canvases for answer in answers)
    return FormatRun(
        name,
        [is_correct(one, answer.text) for one, answer in zip(examples, answers, strict=True)],
        sum(answer.num_denoise_steps or 0 for answer in answers) / num_canvases,
        first_steps,
    )


def compare(args: argparse.Namespace) -> None:
    """Print the comparison of ``--checkpoint`` with the checkpoints of ``--compare``."""
    checkpoints = {"original": args.checkpoint}
    for entry in args.compare:
        name, _, folder = entry.partition("=")
        checkpoints[name] = Path(folder)
    runs = []
    for name, checkpoint in checkpoints.items():
        runs.append(run_format(name, checkpoint, args))
        print(table(runs).splitlines()[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=shipped_checkpoint())
    parser.add_argument("--engine", choices=("transformers", "vllm", "both"), default="both")
    parser.add_argument("--num-prompts", type=int, default=500, help="per family")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=(*FAMILIES, *LATER_FAMILIES),
        default=list(FAMILIES),
        help="default: the first six; fill is asked of vLLM alone",
    )
    parser.add_argument(
        "--size",
        choices=("one", "few", "many"),
        help="items in a question, with nothing before it (default: a mix, a fifth with context)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and of the sampling")
    parser.add_argument("--threads", type=int, help="transformers only")
    parser.add_argument(
        "--settings",
        type=json.loads,
        default={},
        help="vllm only: JSON object of server settings (docs/use/settings.md)",
    )
    parser.add_argument(
        "--compare", nargs="+", metavar="NAME=FOLDER", help="quantised copies of --checkpoint"
    )
    parser.add_argument(
        "--first-step-prompts", type=int, default=60, help="with --compare, about how many"
    )
    args = parser.parse_args()
    if args.compare:
        compare(args)
        return

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    for name in ("transformers", "vllm") if args.engine == "both" else (args.engine,):
        if name == "vllm":
            engine = VllmEngine(args.checkpoint, seed=args.seed, settings=args.settings)
        else:
            engine = TransformersEngine(args.checkpoint, seed=args.seed, threads=args.threads)
        for family in args.families:
            if family == FILL_FAMILY and name != "vllm":
                continue
            line = score(engine, tokenizer, family, args.num_prompts, args.seed, args.size)
            print(line, flush=True)


if __name__ == "__main__":
    # vLLM starts its engine in a fresh process, which imports this file.
    main()
