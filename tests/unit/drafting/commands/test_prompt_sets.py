"""Prompts of files and of data sets by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

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
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A package ``datasets`` that has one row of each, and what it was asked."""
    asked: dict[str, Any] = {}

    def load_dataset(repository: str, configuration: str | None, *, split: str) -> Any:
        (name,) = (n for n, known in HUB_DATA_SETS.items() if known.repository == repository)
        asked[name] = configuration, split
        return [ROWS[name][0]]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(prompt_sets, "ask", lambda *_, **__: b"")
    return asked


@pytest.mark.parametrize("name", HUB_DATA_SETS)
def test_hub(name: str, hub: dict[str, Any]) -> None:
    """Each row is a conversation with what it asks in it, under the data set's name."""
    (prompt,) = read_prompts(name, 5)
    assert prompt.task == name
    turns = ROWS[name][1]
    for (message,), text in zip(prompt.turns, turns, strict=True):
        assert message["role"] == "user"
        assert text in message["content"]
    assert hub[name] == (HUB_DATA_SETS[name].configuration, HUB_DATA_SETS[name].split)


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
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert "give a file of JSON lines" in ended.stderr


def test_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, without the data set: one sentence with the remedy."""
    fake = types.ModuleType("datasets")

    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route\nat all")

    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(prompt_sets, "ask", lambda *_, **__: b"")
    with pytest.raises(
        UsageError, match=r"openai/gsm8k cannot be loaded \(no route\)\. .* --data\."
    ):
        list(hub_prompts("gsm8k"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets, or give a file of JSON lines"):
        list(hub_prompts("gsm8k"))


TEXTS = st.text(min_size=1, max_size=20)


@given(
    st.lists(
        st.one_of(
            st.builds(lambda text: {"prompt": text}, TEXTS),
            st.builds(
                lambda ids: {"prompt": ids}, st.lists(st.integers(0, 99), min_size=1, max_size=5)
            ),
            st.builds(lambda turns: {"turns": turns}, st.lists(TEXTS, min_size=1, max_size=3)),
            st.builds(
                lambda text, task: {"messages": [{"role": "user", "content": text}], "task": task},
                TEXTS,
                TEXTS,
            ),
        ),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 12),
)
def test_file(entries: list[dict[str, Any]], num_prompts: int) -> None:
    """Every line is a prompt of its task, and at most so many of each are drawn, the same each time."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.jsonl"
        path.write_text("\n".join(map(json.dumps, entries)) + "\n\n", encoding="utf-8")
        found = read_prompts(str(path), num_prompts)
        assert found == read_prompts(str(path), num_prompts)
        everything = read_prompts(str(path), len(entries))
    expected = [prompt_of(entry, "mine") for entry in entries]
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
