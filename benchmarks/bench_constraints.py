"""What a JSON schema costs: denoising steps with and without it, for prompts that fit it or do not.

    python benchmarks/bench_constraints.py

Held-out prompts of the shipped checkpoint: JSON records, which it writes by itself, and sums, whose
answers are no records, so that every token is the schema's doing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).resolve().parents[1]
# First: a package of the same name as one of the examples may be installed.
sys.path.insert(0, str(ROOT / "examples" / "checkpoints"))

from tiny_tasks import evaluation_set  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "city": {"type": "string", "maxLength": 12},
    },
    "additionalProperties": False,
    "minProperties": 1,
}
MAX_TOKENS = 96


def is_record(text: str) -> bool:
    """Whether the whole text is one JSON object."""
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-prompts", type=int, default=100)
    args = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_diffusion.cli.checkpoint import shipped_checkpoint
    from vllm_diffusion.metrics import request_metrics

    llm = LLM(
        str(shipped_checkpoint()),
        max_model_len=1024,
        max_num_seqs=8,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
    )
    print(f"{'prompts':10} {'schema':8} steps/canvas  most  JSON objects  ended with stop")
    for family in ("json", "sums"):
        examples = [
            example
            for example in evaluation_set(family, 5 * args.num_prompts)
            if not example.answer.startswith("[")
        ][: args.num_prompts]
        for schema in (None, SCHEMA):
            constraint: Any = None if schema is None else StructuredOutputsParams(json=schema)
            outputs = llm.chat(
                [example.messages for example in examples],
                [
                    SamplingParams(seed=i, max_tokens=MAX_TOKENS, structured_outputs=constraint)
                    for i in range(len(examples))
                ],
                use_tqdm=False,
            )
            answers = [output.outputs[0] for output in outputs]
            steps = [
                n for answer in answers for n in request_metrics(answer).denoise_steps_per_canvas
            ]
            stopped = [answer for answer in answers if answer.finish_reason == "stop"]
            print(
                f"{family:10} {'yes' if schema else 'no':8} {sum(steps) / len(steps):12.2f} "
                f"{max(steps):5}  {sum(is_record(answer.text) for answer in answers):12}  "
                f"{len(stopped):15}",
                flush=True,
            )


if __name__ == "__main__":
    main()
