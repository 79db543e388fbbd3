"""What a JSON schema costs: denoising steps with and without it, for prompts that fit it or do not.

    python benchmarks/bench_constraints.py

Held-out prompts of the shipped checkpoint: JSON records, which it writes by itself, and sums, whose
answers are not records, so that every token is the schema's doing.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from records import Rows, parser_of
from tiny_tasks import evaluation_set

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
    parser = parser_of(__doc__)
    parser.add_argument("--num-prompts", type=int, default=100)
    args = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_diffusion.checkpoints import shipped_checkpoint
    from vllm_diffusion.metrics import request_metrics

    llm = LLM(
        str(shipped_checkpoint()), max_model_len=1024, max_num_seqs=8, language_model_only=True
    )
    data = Rows(args.data)
    for family in ("json", "sums"):
        drawn = evaluation_set(family, 5 * args.num_prompts)
        examples = [e for e in drawn if not e.answer.startswith("[")][: args.num_prompts]
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
            data.add(
                "constraints",
                prompts=family,
                schema=schema is not None,
                steps_a_canvas=round(sum(steps) / len(steps), 2),
                most=max(steps),
                json_objects=sum(is_record(answer.text) for answer in answers),
                ended_with_stop=sum(answer.finish_reason == "stop" for answer in answers),
            )


if __name__ == "__main__":
    main()
