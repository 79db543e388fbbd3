"""Write the prompts that ``vllm-diffusion bench-drafts`` asks the tiny pair.

    python examples/write_tiny_tasks.py

Held-out questions of each task as chat messages, some with long answers, some with a context.
"""

from __future__ import annotations

import json

from tiny_tasks import FAMILIES, evaluation_set

from vllm_diffusion.cli.prompt_sets import TINY_TASKS_FILE

NUM_PROMPTS = 16


def main() -> None:
    lines = [
        json.dumps({"task": family, "messages": example.messages})
        for family in FAMILIES
        for example in evaluation_set(family, NUM_PROMPTS)
    ]
    TINY_TASKS_FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
