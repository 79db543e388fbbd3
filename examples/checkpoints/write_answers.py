"""Write the answers of a CPU that ``vllm-diffusion doctor --gpu`` compares a GPU's with.

    VLLM_DIFFUSION_CPU=1 python examples/checkpoints/write_answers.py

Held-out questions of each task, which the shipped checkpoint answers at temperature 0. Recorded are
those whose answer is right, and the same in bfloat16 and in float32: another order of sums does not
change it.
"""

import json
from itertools import islice

from tiny_tasks import FAMILIES, Example, evaluation_set, is_correct

from vllm_diffusion.checkpoints import ANSWERS, shipped_checkpoint
from vllm_diffusion.cli.gpu_answers import ASKED

PER_FAMILY = 10
# Of each family; some are left out.
NUM_CANDIDATES = 16


def answers(examples: list[Example], dtype: str) -> list[str]:
    """What the CPU platform answers with weights in ``dtype``."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(shipped_checkpoint()),
        dtype=dtype,
        max_model_len=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
    )
    outputs = llm.chat(
        [example.messages for example in examples], SamplingParams(**ASKED), use_tqdm=False
    )
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    examples = [
        example for family in FAMILIES for example in evaluation_set(family, NUM_CANDIDATES)
    ]
    found = zip(
        examples, *(answers(examples, each) for each in ("bfloat16", "float32")), strict=True
    )
    firm = [(each, one) for each, one, other in found if one == other and is_correct(each, one)]
    lines = [
        json.dumps({"messages": example.messages, "answer": answer})
        for family in FAMILIES
        for example, answer in islice(
            (each for each in firm if each[0].family == family), PER_FAMILY
        )
    ]
    print(f"{len(firm)} of {len(examples)} can be recorded, {len(lines)} are")
    ANSWERS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
