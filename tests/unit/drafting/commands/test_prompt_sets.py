"""Prompts of files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_diffusion.cli.values import UsageError
from vllm_diffusion.drafting.commands.prompt_sets import (
    read_prompts,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "examples" / "checkpoints"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "an object is needed with one of prompt and messages"),
        ("{", "Expecting property name"),
        ('{"turns": ["a"]}', "one of prompt and messages"),
        ('{"prompt": "a", "messages": []}', "one of prompt and messages"),
        ('{"prompt": ""}', "prompt must be a text, or a list of token ids"),
        ('{"prompt": [1, true]}', "prompt must be a text, or a list of token ids"),
        ('{"messages": []}', "messages must be a list that is not empty"),
        ('{"messages": [{"content": "a"}]}', "messages must be objects with role and content"),
        ('{"prompt": "a", "task": 3}', "task=3 must be a name"),
    ],
)
def test_bad_lines(line: str, said: str, tmp_path: Path) -> None:
    """The line by its number, and what is wrong with it."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(UsageError, match="line 2: ") as error:
        read_prompts(str(path), 1)
    assert said in str(error.value)
