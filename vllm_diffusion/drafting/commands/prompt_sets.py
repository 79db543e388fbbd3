"""Prompts for servers: lines of a file, or the shipped tasks."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.cli import values
from vllm_diffusion.cli.answer import AnswerError, reason
from vllm_diffusion.cli.values import UsageError
from vllm_diffusion.drafting.recording import read_recording

if TYPE_CHECKING:
    from openai import OpenAI

# Held-out questions of the shipped checkpoints' tasks, and others;
# examples/checkpoints/write_tiny_tasks.py wrote it, at commit 7f70a7b0.
TINY_TASKS_FILE = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_tasks.jsonl"
TINY_TASKS = "tiny-tasks"
_WHAT = f"a file of JSON lines, the folder of a recording, or {TINY_TASKS}"


@dataclass(frozen=True)
class Prompt:
    """A text to go on with, or a conversation.

    Attributes:
        task: Name of the task that it is counted under.
        text: Text or token ids to be completed; ``None`` for a conversation.
        messages: Messages of a conversation.
    """

    task: str
    text: str | tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] = ()


def add_prompts(parser: argparse.ArgumentParser, num_prompts: int, default: str = "") -> None:
    """Add the options that :func:`given_prompts` reads.

    Args:
        parser: Parser of a command that asks servers.
        num_prompts: Default of ``--num-prompts``.
        default: End of the help of ``--data``: the prompts without it.
    """
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help='JSON lines with "prompt" (text or token ids) or "messages", and optionally '
        f'"task"; the folder of a recording, for its held-out prompts; or {TINY_TASKS}{default}',
    )
    values.add_number(
        parser, "--num-prompts", values.integer(), "prompts of each task", num_prompts
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
        raise UsageError(f"--data is missing: give {_WHAT}.")
    return [prompt for name in sources for prompt in read_prompts(name, arguments.num_prompts)]


def read_prompts(source: str, num_prompts: int, seed: int = 0) -> list[Prompt]:
    """Draw at most ``num_prompts`` of each task of a file, by ``seed``, or the newest of a
    recording.

    Raises:
        UsageError: If the source is not there, or a line of it is not a prompt.
    """
    path = TINY_TASKS_FILE if source == TINY_TASKS else Path(source)
    if path.is_dir():
        return _held_out_prompts(path, num_prompts)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise UsageError(f"--data {path}: {problem}. It must be {_WHAT}.") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                prompts.append(prompt_of(json.loads(line), path.stem))
        except ValueError as error:
            raise UsageError(f"--data {path}, line {number}: {error}") from None
    if not prompts:
        raise UsageError(f"--data {source} holds no prompt.")
    rng = random.Random(seed)
    return [
        prompt
        for theirs in by_task(prompts).values()
        for prompt in rng.sample(theirs, min(num_prompts, len(theirs)))
    ]


def _held_out_prompts(recording: Path, num_prompts: int) -> list[Prompt]:
    """Return the newest prompts of a recording that no training has seen, each once.

    Raises:
        UsageError: If there is none.
    """
    try:
        exchanges = read_recording(recording).exchanges
    except ValueError as error:
        raise UsageError(f"--data {error}") from None
    texts = [
        tuple(each.prompt_token_ids)
        for each in reversed(exchanges)
        if each.is_held_out and each.prompt_token_ids
    ]
    if not texts:
        raise UsageError(
            f"--data {recording}: none of {len(exchanges)} recorded exchanges is a prompt that is held out of "
            "training; record more (one in ten is)."
        )
    return [Prompt("held out", text=text) for text in list(dict.fromkeys(texts))[:num_prompts]]


def by_task(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    """Group prompts by task."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.task, []).append(prompt)
    return groups


def prompt_of(entry: Any, task: str) -> Prompt:
    """Make a prompt of one entry of a file.

    Args:
        entry: JSON object with ``prompt`` or ``messages``, and perhaps ``task``.
        task: Task of an entry without one.

    Raises:
        ValueError: Naming what is wrong with it.
    """
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError("must be an object with either prompt or messages.")
    task = entry.get("task", task)
    if not isinstance(task, str) or not task:
        raise ValueError(f"task={task!r} must be a name.")
    text, messages = entry.get("prompt"), entry.get("messages")
    if "messages" in entry:
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a non-empty list.")
        if not all(isinstance(message, dict) and "role" in message for message in messages):
            raise ValueError("messages must be objects with role and content.")
        return Prompt(task, messages=tuple(messages))
    if isinstance(text, list) and all(type(token) is int for token in text):
        text = tuple(text)
    if not isinstance(text, str | tuple) or not text:
        raise ValueError("prompt must be a string or a list of token ids.")
    return Prompt(task, text=text)


def answer(
    client: OpenAI, prompt: Prompt, options: Mapping[str, Any], extra_body: Mapping[str, Any] = {}
) -> tuple[int, ...]:
    """Ask a prompt, and return the token ids of the answer.

    Args:
        client: Client of the server.
        prompt: Its text or messages.
        options: Options of the request, the model among them.
        extra_body: Fields that the client does not know.

    Raises:
        AnswerError: If the server refuses a request or cannot be reached.
    """
    options = {**options, "extra_body": {"return_token_ids": True, **extra_body}}
    given: Any = prompt.messages if prompt.text is None else prompt.text
    given = list(given) if isinstance(given, tuple) else given
    try:
        if prompt.text is None:
            completion = client.chat.completions.create(messages=given, **options)
        else:
            completion = client.completions.create(prompt=given, **options)
        return tuple(completion.choices[0].token_ids)
    except Exception as error:
        # Raised by the HTTP library or by the client.
        raise AnswerError(reason(error)) from error
