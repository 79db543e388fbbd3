"""Prompts of files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.cli.values import UsageError
from vllm_diffusion.drafting.commands.prompt_sets import (
    TINY_TASKS,
    TINY_TASKS_FILE,
    prompt_of,
    read_prompts,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "examples" / "checkpoints"))

import write_tiny_tasks

TEXTS = st.text(min_size=1, max_size=20)


MESSAGES = TEXTS.map(lambda text: [{"role": "user", "content": text}])
ENTRIES = st.one_of(
    st.fixed_dictionaries({"prompt": TEXTS | st.lists(st.integers(0, 99), min_size=1, max_size=5)}),
    st.fixed_dictionaries({"messages": MESSAGES, "task": TEXTS}),
)


@given(entries=st.lists(ENTRIES, min_size=1, max_size=10), num_prompts=st.integers(1, 12))
def test_file(
    entries: list[dict[str, Any]], num_prompts: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every line is a prompt of its task, and at most so many of each are drawn, the same each time."""
    path = tmp_path_factory.getbasetemp() / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)) + "\n\n", encoding="utf-8")
    found = read_prompts(str(path), num_prompts)
    assert found == read_prompts(str(path), num_prompts)
    expected = [prompt_of(entry, "mine") for entry in entries]
    everything = read_prompts(str(path), len(entries))
    assert sorted(map(repr, everything)) == sorted(map(repr, expected))
    for task in {prompt.task for prompt in expected}:
        theirs = [prompt for prompt in expected if prompt.task == task]
        drawn = [prompt for prompt in found if prompt.task == task]
        assert len(drawn) == min(num_prompts, len(theirs))
        assert all(prompt in theirs for prompt in drawn)


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


def test_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="holds no prompt"):
        read_prompts(str(tmp_path / "empty.jsonl"), 1)
    with pytest.raises(UsageError, match="a file of JSON lines, or tiny-tasks"):
        read_prompts("gsm8k", 1)


def test_shipped() -> None:
    """Six tasks with sixteen questions each, and as many that are of no task."""
    prompts = read_prompts(TINY_TASKS, 99)
    tasks = [prompt.task for prompt in prompts]
    assert {task: tasks.count(task) for task in tasks} == dict.fromkeys(
        ("sums", "reverse", "upper", "json", "count", "list", "other"), 16
    )
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)
    assert TINY_TASKS_FILE.read_text(encoding="utf-8") == write_tiny_tasks.content()
