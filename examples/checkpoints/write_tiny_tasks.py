"""Write the prompts that ``vllm-diffusion bench-drafts`` asks the tiny pair.

    python examples/checkpoints/write_tiny_tasks.py

Held-out questions of each task as chat messages, some with long answers, some with a context; and
questions that are of no task, whose answers are beyond the target and its draft.
"""

from __future__ import annotations

import json

from tiny_tasks import FAMILIES, evaluation_set

from vllm_diffusion.drafting.commands.prompt_sets import TINY_TASKS_FILE

NUM_PROMPTS = 16
OTHERS = (
    "Why is the sky blue on a clear summer day?",
    "Tell me a story about a dragon and a lighthouse.",
    "Explain how a bicycle stays upright.",
    "What should I cook tonight with rice and two eggs?",
    "Write a function that sorts a list of words.",
    "Which planet is the largest, and how large is it?",
    "Translate into French: where is the station?",
    "Give me three reasons to learn to swim.",
    "How do I remove a coffee stain from a shirt?",
    "Describe the taste of a ripe mango.",
    "Who painted the ceiling of the chapel in Rome?",
    "Plan a weekend in the mountains for two people.",
    "What happens to water when it freezes?",
    "Write a short letter to an old friend.",
    "Why do leaves change their color in autumn?",
    "Compare trains with planes for a long journey.",
)


def content() -> str:
    """Of the file."""
    lines = [
        json.dumps({"task": family, "messages": example.messages})
        for family in FAMILIES
        for example in evaluation_set(family, NUM_PROMPTS)
    ]
    lines += [
        json.dumps({"task": "other", "messages": [{"role": "user", "content": question}]})
        for question in OTHERS
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    TINY_TASKS_FILE.write_text(content(), encoding="utf-8")


if __name__ == "__main__":
    main()
