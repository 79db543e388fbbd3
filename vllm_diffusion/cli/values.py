"""Readers of what a user types, each the ``type`` of an option of ``argparse``.

They refuse values that would fail late, or with a stack trace; the rest is left to ``argparse`` and
vLLM. :class:`UsageError` is for problems that involve more than one option.
"""

import argparse
import ipaddress
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

Refusal = argparse.ArgumentTypeError


class UsageError(Exception):
    """A command line that cannot be carried out as it was typed. The message names the option."""


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line and exit status 2.

    What it parses has the parser of its subcommand as ``parser``.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """End the process.

        Args:
            message: What was wrong with the command line.
        """
        # A name that is unknown or missing is looked up; a value's refusal names what is allowed.
        is_value = message.startswith(("argument ", "--"))
        hint = "" if is_value else f" (`{self.prog} --help` shows the usage)"
        self.exit(2, f"{self.prog}: {' '.join(message.split())}{hint}\n")


def add_number(
    parser: argparse._ActionsContainer,
    option: str,
    read: Callable[[str], float],
    meaning: str,
    default: float | None = None,
    metavar: str = "N",
) -> None:
    """Add an option whose value is a number; its help has the default, where there is one."""
    shown = "" if default is None else " (default: %(default)s)"
    parser.add_argument(
        option, type=read, default=default, metavar=metavar, help=f"{meaning}{shown}"
    )


def number(
    least: float, most: float = sys.float_info.max, *, kind: Callable[[str], Any] = float
) -> Callable[[str], Any]:
    """Make a reader of finite numbers from ``least`` to ``most``; ``kind`` is ``float`` or
    ``int``.
    """
    limit = f"from {least} to {most}" if most < sys.float_info.max else f"of at least {least}"

    def read(value: str) -> Any:
        try:
            parsed = kind(value)
        except ValueError:
            parsed = None
        if parsed is None or not least <= parsed <= most:
            noun = "an integer" if kind is int else "a number"
            raise Refusal(f"{value!r} must be {noun} {limit}.")
        return parsed

    return read


def integer(least: int = 1, most: float = sys.float_info.max) -> Callable[[str], int]:
    """Make a reader of integers from ``least`` to ``most``."""
    return number(least, most, kind=int)


# PyTorch's and vLLM's.
seed = integer(-(2**63), 2**63 - 1)


def url(value: str) -> str:
    """Read the root of a server, without ``/v1`` and without a slash at its end."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refusal(f"{value!r} must be the address of a server, such as http://127.0.0.1:8000.")
    return value.rstrip("/").removesuffix("/v1").rstrip("/")


def model(value: str) -> str:
    """Read a folder of a checkpoint, a repository on the hub, or an address that vLLM loads
    from.
    """
    is_path = value[:1] in ("", "/", ".", "~") or value.count("/") > 1 or os.path.isdir(value)
    if is_path and "://" not in value:
        # Mistral's own format has the other one.
        return str(folder_with("config.json", "params.json")(value))
    return value


def path(value: str) -> Path:
    """Read a path, ``~`` too, which a shell leaves in ``--out=~/draft``."""
    return Path(os.path.expanduser(value))


def folder_with(*names: str) -> Callable[[str], Path]:
    """Make a reader of folders that hold one of some files."""

    def read(value: str) -> Path:
        folder_path = path(value)
        if not any(os.path.isfile(folder_path / name) for name in names):
            raise Refusal(f"{value!r} must be a folder with {' or '.join(names)}.")
        return folder_path

    return read


# A folder of a draft.
draft = folder_with("config.json")


def file(value: str) -> Path:
    """Read the path of a file that is there."""
    file_path = path(value)
    if not os.path.isfile(file_path):
        raise Refusal(f"{value!r} must be a file.")
    return file_path


def folder(value: str) -> Path:
    """Read the path of a folder that can be written, there or not."""
    folder_path = path(value)
    nearest = next(
        each for each in (folder_path, *folder_path.absolute().parents) if os.path.exists(each)
    )
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise Refusal(f"{value!r} must be a folder that can be written.")
    return folder_path


def new_file(value: str) -> Path:
    """Read the path of a file that can be written, there or not, in a folder that is there."""
    file_path = path(value)
    place = file_path if os.path.exists(file_path) else file_path.absolute().parent
    if file_path.is_dir() or not os.access(place, os.W_OK):
        raise Refusal(f"{value!r} must be a file that can be written, in a folder that is there.")
    return file_path


def schema(value: str) -> dict[str, Any]:
    """Read a JSON schema, or the file that holds one."""
    try:
        is_schema = value.lstrip().startswith("{")
        read: dict[str, Any] = json.loads(value if is_schema else path(value).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(f"it must be a JSON schema, or a file that holds one: {error}.") from None
    return read


def is_loopback(host: str) -> bool:
    """Return whether a host of an address is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def printable(value: str) -> str:
    """Return ``value`` without the control characters that could steer a terminal."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value
    )
