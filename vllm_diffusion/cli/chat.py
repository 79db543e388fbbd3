"""``vllm-diffusion chat``: a conversation in the terminal, with the canvas while it is denoised."""

from __future__ import annotations

import argparse
import base64
import json
import mimetypes
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.checkpoints import shipped_tasks
from vllm_diffusion.cli import values
from vllm_diffusion.cli.answer import (
    AnswerError,
    display_for,
    figures,
    first_model,
    folder_of,
    reason,
    stream_answer,
)
from vllm_diffusion.cli.checkpoint import add_family, family_of, shipped_server
from vllm_diffusion.cli.client import openai_client
from vllm_diffusion.cli.console import add_verbose, say
from vllm_diffusion.cli.values import printable

if TYPE_CHECKING:
    from openai import OpenAI

    from vllm_diffusion.cli.checkpoint import Subcommands

_KEY_VARIABLES = ("VLLM_API_KEY", "OPENAI_API_KEY")


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "chat",
        help="talk to a model and watch its canvases",
        description="A conversation in the terminal: the canvas is drawn while it is denoised, its "
        "kept tokens plain and the others dim. Without --url a server is started on a shipped "
        "checkpoint, and stopped at the end. Ctrl-C stops an answer, Ctrl-D or /quit ends the "
        "conversation, /help lists the other commands.",
    )
    parser.add_argument(
        "--url", type=values.url, help="address of a running server, such as http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="key of that server; better set VLLM_API_KEY or OPENAI_API_KEY, since other users can read "
        "the arguments of a command",
    )
    parser.add_argument("--model", help="name of the model on that server (default: its first)")
    values.add_number(parser, "--max-tokens", values.integer(), "longest answer, in tokens", 512)
    parser.add_argument("--plain", action="store_true", help="print only text, draw nothing")
    add_family(parser)
    add_verbose(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for name in ("family", "verbose") if arguments.url else ("model", "api_key"):
        if getattr(arguments, name):
            which = (
                "is of a server that chat starts" if arguments.url else "needs the server's --url"
            )
            raise values.UsageError(f"--{name.replace('_', '-')} {which}.")
    with ExitStack() as stack:
        if arguments.url is None:
            server = stack.enter_context(
                shipped_server(family_of(arguments), say, verbose=arguments.verbose)
            )
            url, key = server.url, server.api_key
        else:
            url = arguments.url
            keys = (arguments.api_key, *(os.environ.get(name) for name in _KEY_VARIABLES))
            key = next((key for key in keys if key), "")
        client = openai_client(url, key)
        model = arguments.model or first_model(client)
        say(f"Talking to {model}. /help lists commands; Ctrl-D ends.")
        if tasks := shipped_tasks(folder_of(client, model)):
            say(tasks)
        Conversation(client, model, arguments.max_tokens, arguments.plain).run()
    return 0


@dataclass
class Settings:
    """Settings that the conversation's commands change; ``None`` leaves one to the server."""

    way: str | None = None
    preset: str | None = None
    steps: int | None = None
    temperature: float | None = None
    seed: int | None = None
    schema: dict[str, Any] | None = None
    system: str | None = None

    def opening(self) -> list[Any]:
        """Messages before the conversation."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def request(self) -> dict[str, Any]:
        """Arguments of ``chat.completions.create``."""
        own = {
            "diffusion_rule": self.way,
            "diffusion_preset": self.preset,
            "diffusion_max_steps": self.steps,
        }
        request: dict[str, Any] = {"temperature": self.temperature, "seed": self.seed}
        if self.schema is not None:
            schema = {"name": "answer", "schema": self.schema}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        request = {name: value for name, value in request.items() if value is not None}
        if own := {name: value for name, value in own.items() if value is not None}:
            request["extra_body"] = {"vllm_xargs": own}
        return request


@dataclass
class Conversation:
    """Conversation with a server: its messages so far, and settings of the next request."""

    client: OpenAI
    model: str
    max_tokens: int
    plain: bool
    settings: Settings = field(default_factory=Settings)
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Read lines until there are no more."""
        is_typed = sys.stdin.isatty()
        if is_typed:
            self._edit_lines()
        while True:
            try:
                line = input("> " if is_typed else "").strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                say("\nCtrl-D or /quit ends the conversation.")
                continue
            if line == "/quit":
                break
            if line.startswith("/"):
                say(self.command(line))
            elif line:
                self.ask(line)

    def _edit_lines(self) -> None:
        """Have ``input`` edit lines, recall earlier ones and complete them, where Python has
        readline.
        """
        try:
            import readline
        except ImportError:
            return
        found: list[str] = []

        def complete(_word: str, index: int) -> str | None:
            # Asked for one at a time; the server is asked for its names once.
            if index == 0:
                found[:] = self.completions(readline.get_line_buffer())
            return found[index] if index < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" ")
        is_editline = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_editline else "tab: complete")

    def completions(self, line: str) -> list[str]:
        """Return what the last word of a line may become: a command, or a name that the server
        has.
        """
        before, _, word = line.rpartition(" ")
        known: Sequence[str] = _COMMANDS if not before else ()
        if before in ("/preset", "/way"):
            known = self._choices(before[1:])
        return [name for name in known if name.startswith(word)]

    def ask(self, text: str) -> None:
        """Show the answer to a message, and remember both."""
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        content = [*images, {"type": "text", "text": text}] if images else text
        message = {"role": "user", "content": content}
        request = {
            "model": self.model,
            "messages": [*self.settings.opening(), *self.messages, message],
            "max_tokens": self.max_tokens,
            **self.settings.request(),
        }
        # Without a canvas there is nothing to draw, and frames would be refused.
        plain = self.plain or self.settings.way == "autoregressive"
        try:
            answer = stream_answer(self.client, request, display_for(sys.stdout, plain=plain))
        except AnswerError as error:
            say(str(error))
            return
        except KeyboardInterrupt:
            say("Stopped; the question and what was said are forgotten.")
            return
        self.images.clear()
        self.messages += [message, {"role": "assistant", "content": answer.text}]
        if took := figures(answer):
            say(f"  {took}")
        if answer.finish_reason == "length":
            say("  cut at --max-tokens or at the model's length")

    def command(self, line: str) -> str:
        """Run the command of a line that begins with a slash.

        Returns:
            What was done, or why it was not.
        """
        name, _, value = line[1:].partition(" ")
        value = value.strip()
        if name == "help":
            presets, ways = (", ".join(self._choices(each)) for each in ("preset", "way"))
            none = "not on this server"
            return _HELP.format(presets=presets or none, ways=ways or none)
        if name == "reset":
            self.messages.clear()
            self.images.clear()
            return "The conversation begins anew; settings stay."
        if name == "image":
            return self._add_image(value)
        if name not in _READERS:
            return f"/{printable(name)} is not a command; /help lists them."
        try:
            read = None if value in ("", "off") else _READERS[name](value)
            changed = replace(self.settings, **{name: read})
            if read is not None:
                self._try(changed)
        except (values.Refusal, AnswerError) as error:
            return f"/{name}: {error}"
        self.settings = changed
        if read is None:
            return f"{name}: left to the server"
        return f"{name}: {printable(json.dumps(read) if name == 'schema' else str(read))}"

    def _try(self, settings: Settings) -> None:
        """Have the server check settings, in a request for one token; its answer is dropped.

        Which presets a model has, and how many steps, only its server knows.

        Raises:
            AnswerError: If it does not.
        """
        messages: list[Any] = [*settings.opening(), {"role": "user", "content": "a"}]
        try:
            self.client.chat.completions.create(
                model=self.model, messages=messages, max_tokens=1, **settings.request()
            )
        except Exception as error:
            # Errors of the HTTP library and of the client.
            raise AnswerError(reason(error)) from error

    def _choices(self, setting: str) -> list[str]:
        """Return the names that a setting may have, as the server lists them where it refuses
        another one.
        """
        refused: dict[str, Any] = {setting: "?"}
        try:
            self._try(Settings(**refused))
        except AnswerError as error:
            names = re.search(r"diffusion_\w+ must be one of ([\w, ]+)", str(error))
            return names[1].split(", ") if names else []
        return []

    def _add_image(self, value: str) -> str:
        if not value:
            self.images.clear()
            return "No image goes with the next message."
        if value.startswith(("http://", "https://", "data:")):
            self.images.append(value)
            return "The image goes with the next message."
        # pathlib raises for a user without a home.
        path = Path(os.path.expanduser(value))
        kind = mimetypes.guess_type(path.name)[0] or ""
        if not kind.startswith("image/"):
            return f"/image needs the file or the address of an image; got {printable(value)}."
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as error:
            return f"/image: {printable(value)} cannot be read: {error.strerror}."
        self.images.append(f"data:{kind};base64,{data}")
        return "The image goes with the next message."


_READERS: dict[str, Callable[[str], Any]] = {
    "system": str,
    "way": str,
    "preset": str,
    "steps": values.integer(),
    "temperature": values.number(0, 2),
    "seed": values.seed,
    "schema": values.schema,
}
_COMMANDS = tuple(f"/{name}" for name in ("help", "image", "reset", "quit", *_READERS))
_HELP = """\
/system TEXT        stands before the conversation
/way NAME           how tokens are made: {ways}
/preset NAME        the model's settings for quality or speed: {presets}
/steps N            at most N denoising steps a canvas
/temperature X      of the draws; 0 takes the likeliest tokens
/seed N             the same draws every time
/schema FILE        answers are JSON that fits the schema in this file; the schema itself does too
/image FILE         goes with the next message; an address does too
/reset              forget what was said
/quit               or Ctrl-D
Without a value, or with off, a setting is the server's again. Ctrl-C stops an answer.
Tab completes commands, ways and presets; the up arrow recalls what was typed."""
