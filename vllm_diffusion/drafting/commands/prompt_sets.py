"""Prompts for servers, from a file, from a data set by its name, or from the shipped tasks."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.cli import values
from vllm_diffusion.cli.answer import AnswerError, reason
from vllm_diffusion.cli.client import ask
from vllm_diffusion.cli.values import UsageError

if TYPE_CHECKING:
    from openai import OpenAI

# Seconds after which a hub that says nothing is one that cannot be reached.
_HUB_SECONDS = 10.0
# Held-out questions of the shipped checkpoints' tasks, and others; examples/checkpoints/write_tiny_tasks.py writes it.
TINY_TASKS_FILE = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_tasks.jsonl"
TINY_TASKS = "tiny-tasks"


@dataclass(frozen=True)
class Prompt:
    """A text to go on with, or a conversation.

    Attributes:
        task: What it is counted under.
        text: To be completed, as text or token ids; ``None`` for a conversation.
        turns: Messages before each answer that is asked for: the first turn's, then what follows the
            first answer, and so on.
        thinking: Whether the chat template lets the model think; ``None`` for its own default.
    """

    task: str
    text: str | tuple[int, ...] | None = None
    turns: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    thinking: bool | None = None


@dataclass(frozen=True)
class HubDataSet:
    """Place of a data set, and what of a row is asked.

    Attributes:
        repository: On the hub.
        configuration: Of the repository, if it has several.
        split: That is asked.
        ask: The user's turns of a row.
    """

    repository: str
    configuration: str | None
    split: str
    ask: Callable[[Mapping[str, Any]], list[str]]


def _reasoned(question: str) -> list[str]:
    return [
        f"{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    ]


HUB_DATA_SETS = {
    "gsm8k": HubDataSet("openai/gsm8k", "main", "test", lambda row: _reasoned(row["question"])),
    "math500": HubDataSet(
        "HuggingFaceH4/MATH-500", None, "test", lambda row: _reasoned(row["problem"])
    ),
    "humaneval": HubDataSet(
        "openai/openai_humaneval",
        None,
        "test",
        lambda row: [f"Complete this Python function.\n```python\n{row['prompt']}\n```"],
    ),
    "mbpp": HubDataSet(
        "google-research-datasets/mbpp",
        "sanitized",
        "test",
        lambda row: [f"Write Python code. {row['prompt']}\nIt must pass:\n{row['test_list'][0]}"],
    ),
    "mt-bench": HubDataSet(
        "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])
    ),
}
NAMES = (TINY_TASKS, *HUB_DATA_SETS)


def add_prompts(parser: argparse.ArgumentParser, num_prompts: int, default: str = "") -> None:
    """Add the options that :func:`given_prompts` reads.

    Args:
        parser: Of a command that asks servers.
        num_prompts: Default of ``--num-prompts``.
        default: What the help says of a command line without ``--data``.
    """
    parser.add_argument(
        "--data",
        nargs="+",
        type=source,
        metavar="FILE_OR_NAME",
        help='JSON lines with "prompt" (text or token ids to go on with), "messages" or "turns", and '
        f'perhaps "task"; or {", ".join(NAMES)}{default}',
    )
    values.add_number(parser, "--num-prompts", values.integer(), "of each task", num_prompts)
    parser.add_argument(
        "--thinking",
        nargs="+",
        choices=("on", "off"),
        default=[],
        help="ask conversations with the chat template's enable_thinking, each setting a task of its own; "
        "default: what the template does by itself",
    )


def given_prompts(arguments: argparse.Namespace, default: Sequence[str] = ()) -> list[Prompt]:
    """Read the prompts that a command line names.

    Args:
        arguments: Values of :func:`add_prompts`.
        default: Sources where none is given.

    Raises:
        UsageError: As :func:`read_prompts`, and if there is no source.
    """
    sources = arguments.data or default
    if not sources:
        raise UsageError(f"--data is missing: give a file of JSON lines, or {', '.join(NAMES)}.")
    prompts = [each for name in sources for each in read_prompts(name, arguments.num_prompts)]
    if not arguments.thinking:
        return prompts
    # A text to go on with has no template.
    return [each for each in prompts if each.text is not None] + [
        replace(each, task=f"{each.task} (thinking {word})", thinking=word == "on")
        for word in dict.fromkeys(arguments.thinking)
        for each in prompts
        if each.text is None
    ]


def source(value: str) -> str:
    """Read a value of ``--data``: one of :data:`NAMES`, or the path of a file of JSON lines."""
    if value not in NAMES:
        path = values.path_of(value)
        if values.found(path, f"a file of JSON lines, or one of {', '.join(NAMES)}").is_dir():
            raise values.Refusal(f"{path} is a folder; it must be a file of JSON lines.")
    return value


def read_prompts(source: str, num_prompts: int, seed: int = 0) -> list[Prompt]:
    """Draw at most ``num_prompts`` of each task of a source, by ``seed``.

    Args:
        source: One of :data:`NAMES`, or the path of a file of JSON lines.
        num_prompts: Of a task.
        seed: Of the draw.

    Raises:
        UsageError: If the source is not there, or a line of it is no prompt.
    """
    if source in HUB_DATA_SETS:
        prompts = hub_prompts(source)
    else:
        prompts = file_prompts(TINY_TASKS_FILE if source == TINY_TASKS else Path(source))
    if not prompts:
        raise UsageError(f"--data {source} holds no prompt.")
    rng = random.Random(seed)
    return [
        prompt
        for theirs in by_task(prompts).values()
        for prompt in rng.sample(theirs, min(num_prompts, len(theirs)))
    ]


def by_task(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    """Group prompts by task."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.task, []).append(prompt)
    return found


def file_prompts(path: Path) -> list[Prompt]:
    """Read the prompt of each line; a file without ``task`` is a task of its own name."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--data {path}: {getattr(error, 'strerror', None) or error}. It must be a file of JSON "
            f"lines, or one of {', '.join(NAMES)}."
        ) from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(prompt_of(json.loads(line), path.stem))
        except ValueError as error:
            raise UsageError(f"--data {path}, line {number}: {error}") from None
    return found


def prompt_of(entry: Any, task: str) -> Prompt:
    """Make a prompt of one entry of a file.

    Args:
        entry: Of JSON: an object with ``prompt`` (text or token ids to go on with), ``messages`` (a
            conversation) or ``turns`` (what a user says, one after another), and perhaps ``task``.
        task: Where it has none.

    Raises:
        ValueError: Naming what is wrong with it.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"an object is needed, not {type(entry).__name__}.")
    kinds = [name for name in ("prompt", "messages", "turns") if name in entry]
    if len(kinds) != 1:
        raise ValueError("give one of prompt, messages and turns.")
    task = entry.get("task", task)
    if not isinstance(task, str) or not task:
        raise ValueError(f"task={task!r} must be a name.")
    value = entry[kinds[0]]
    if kinds[0] == "prompt":
        if isinstance(value, str) and value:
            return Prompt(task, text=value)
        if isinstance(value, list) and value and all(type(token) is int for token in value):
            return Prompt(task, text=tuple(value))
        raise ValueError("prompt must be a text, or a list of token ids.")
    if not isinstance(value, list) or not value:
        raise ValueError(f"{kinds[0]} must be a list that is not empty.")
    if kinds[0] == "turns":
        if not all(isinstance(turn, str) for turn in value):
            raise ValueError("turns must be texts.")
        return _conversation(task, value)
    if not all(isinstance(message, dict) and "role" in message for message in value):
        raise ValueError("messages must be objects with role and content.")
    return Prompt(task, turns=(tuple(value),))


def hub_prompts(name: str) -> list[Prompt]:
    """Read all prompts of a data set.

    Raises:
        UsageError: If ``datasets`` is not installed, or cannot load it.
    """
    known = HUB_DATA_SETS[name]
    remedy = 'give a file of JSON lines with {"prompt": ...} or {"turns": [...]} as --data'
    try:
        return [_conversation(name, known.ask(row)) for row in _hub_rows(known)]
    except ImportError:
        raise UsageError(
            f"--data {name} needs the package datasets: pip install datasets, or {remedy}."
        ) from None
    except Exception as error:
        # Errors of the hub, of the network and of the files; all of them are the user's to know.
        said = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UsageError(
            f"--data {name}: {known.repository} cannot be loaded ({said}). Where no hub can be reached, "
            f"{remedy}."
        ) from None


def _hub_rows(known: HubDataSet) -> Any:
    """Load the rows of a data set, from this machine's cache where no hub answers."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        try:
            # Whatever it answers: what it says of a data set is asked below.
            ask(constants.ENDPOINT, method="HEAD", timeout=_HUB_SECONDS)
        except OSError:
            # The library would ask six times for half a minute, and print a line each time. It copies
            # this when it is imported.
            constants.HF_HUB_OFFLINE = True
    from datasets import load_dataset

    return load_dataset(known.repository, known.configuration, split=known.split)


def _conversation(task: str, turns: Iterable[str]) -> Prompt:
    return Prompt(task, turns=tuple(({"role": "user", "content": turn},) for turn in turns))


def answers(client: OpenAI, prompt: Prompt, options: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Ask a prompt, turn after turn, and return the token ids of each answer.

    Args:
        client: Of the server.
        prompt: What is asked.
        options: Of each request: its model, and what is set of the answer.

    Raises:
        AnswerError: If the server refuses a request or cannot be reached.
    """
    extra: dict[str, Any] = {"return_token_ids": True}
    if prompt.thinking is not None:
        extra["chat_template_kwargs"] = {"enable_thinking": prompt.thinking}
    options = {**options, "extra_body": extra}
    try:
        if prompt.text is not None:
            text = prompt.text if isinstance(prompt.text, str) else list(prompt.text)
            completion = client.completions.create(prompt=text, **options)
            return [tuple(completion.choices[0].token_ids)]
        said = []
        messages: list[Any] = []
        for turn in prompt.turns:
            messages += turn
            answer = client.chat.completions.create(messages=messages, **options)
            said.append(tuple(answer.choices[0].token_ids))
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    except Exception as error:
        # Of the HTTP library or of the client's.
        raise AnswerError(reason(error)) from error
    return said
