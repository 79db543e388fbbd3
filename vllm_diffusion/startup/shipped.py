"""The checkpoints that come with this package, and the tasks that they were trained on."""

from __future__ import annotations

from pathlib import PurePosixPath

from vllm_diffusion.checkpoints import CHECKPOINTS

# examples/checkpoints/tiny_tasks.py draws them; docs/use/serving.md has the same sentence.
TASKS = (
    "This tiny model adds numbers up to 20, reverses words, writes them in capitals, counts, makes "
    'lists and writes JSON, and can do little else: try "What is 7+8?" or "Reverse the word lamp."'
)


def shipped_tasks(model: str) -> str:
    """Return a sentence on what a shipped checkpoint can do, and of any other model an empty string.

    Args:
        model: Path or name by which a server knows its model. The server may be on another machine.
    """
    is_shipped = PurePosixPath(model).parts[-3:-1] == CHECKPOINTS.parts[-2:]
    return TASKS if is_shipped else ""
