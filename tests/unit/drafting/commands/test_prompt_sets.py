"""Prompts of files and of data sets by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.cli.values import UsageError
from vllm_diffusion.drafting.commands import prompt_sets
from vllm_diffusion.drafting.commands.prompt_sets import (
    HUB_DATA_SETS,
    TINY_TASKS,
    TINY_TASKS_FILE,
    hub_prompts,
    prompt_of,
    read_prompts,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "examples" / "checkpoints"))

import write_tiny_tasks

# A row of each as its repository has it, and what of it is asked.
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gsm8k": ({"question": "How many?", "answer": "4"}, ["How many?"]),
    "math500": ({"problem": "$x$?", "solution": "", "answer": "1", "level": 2}, ["$x$?"]),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():\n", "test": ""}, ["def f():\n"]),
    "mbpp": (
        {"task_id": 2, "prompt": "Write f.", "code": "", "test_list": ["assert f()", "assert g()"]},
        ["Write f."],
    ),
    "mt-bench": ({"category": "writing", "prompt": ["First", "Second"]}, ["First", "Second"]),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package ``datasets``; a test says what it loads."""
    fake = types.ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(prompt_sets, "ask", lambda *_, **__: b"")
    return fake


@pytest.mark.parametrize("name", HUB_DATA_SETS)
def test_hub(name: str, hub: Any) -> None:
    """Each row is a conversation with what it asks in it, under the data set's name."""
    row, turns = ROWS[name]
    hub.load_dataset = mock.Mock(return_value=[row])
    (prompt,) = read_prompts(name, 5)
    assert prompt.task == name
    for (message,), text in zip(prompt.turns, turns, strict=True):
        assert message["role"] == "user"
        assert text in message["content"]
    known = HUB_DATA_SETS[name]
    hub.load_dataset.assert_called_once_with(
        known.repository, known.configuration, split=known.split
    )


def test_no_hub(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, without the data set: one sentence with the remedy."""
    hub.load_dataset = mock.Mock(side_effect=ConnectionError("no route\nat all"))
    refused = r"openai/gsm8k cannot be loaded \(no route\)\. .* --data\."
    with pytest.raises(UsageError, match=refused):
        list(hub_prompts("gsm8k"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets, or give a file of JSON lines"):
        list(hub_prompts("gsm8k"))


def test_no_network(tmp_path: Path) -> None:
    """The whole of what is printed is one line with the remedy: no warning, no line for each new attempt."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    ended = subprocess.run(
        [sys.executable, "-m", "vllm_diffusion.cli.main", "bench-drafts", "--data", "gsm8k"],
        env=os.environ | nowhere,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert "give a file of JSON lines" in ended.stderr


TEXTS = st.text(min_size=1, max_size=20)


MESSAGES = TEXTS.map(lambda text: [{"role": "user", "content": text}])
ENTRIES = st.one_of(
    st.fixed_dictionaries({"prompt": TEXTS | st.lists(st.integers(0, 99), min_size=1, max_size=5)}),
    st.fixed_dictionaries({"turns": st.lists(TEXTS, min_size=1, max_size=3)}),
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
        ("[1]", "an object is needed, not list"),
        ("{", "Expecting property name"),
        ('{"text": "a"}', "give one of prompt, messages and turns"),
        ('{"prompt": "a", "turns": ["a"]}', "give one of prompt, messages and turns"),
        ('{"prompt": ""}', "prompt must be a text, or a list of token ids"),
        ('{"prompt": [1, true]}', "prompt must be a text, or a list of token ids"),
        ('{"turns": []}', "turns must be a list that is not empty"),
        ('{"turns": [1]}', "turns must be texts"),
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
    with pytest.raises(UsageError, match="or one of tiny-tasks, gsm8k"):
        read_prompts("gms8k", 1)


def test_shipped() -> None:
    """Six tasks with sixteen questions each, and as many that are of no task."""
    prompts = read_prompts(TINY_TASKS, 99)
    tasks = [prompt.task for prompt in prompts]
    assert {task: tasks.count(task) for task in tasks} == dict.fromkeys(
        ("sums", "reverse", "upper", "json", "count", "list", "other"), 16
    )
    assert all(prompt.turns[0][-1]["role"] == "user" for prompt in prompts)
    assert TINY_TASKS_FILE.read_text(encoding="utf-8") == write_tiny_tasks.content()
