"""Checks of what a user types: a value that cannot be meant is refused before anything is imported or started.

Each function here is, or makes, the ``type`` of an option of ``argparse``, whose refusal becomes one line that
names the option. :class:`UsageError` is the same for what no single option shows.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

Refusal = argparse.ArgumentTypeError

_LARGEST = 2**31 - 1
SEEDS = (-(2**63), 2**63 - 1)
_PORTS = (1, 65_535)
# The name of a repository on the hub, with its owner or without.
_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
# What torch calls a device, and what of the system shows that there is one.
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_DEVICE_NODES = ("nvidia[0-9]*", "dxg", "kfd")


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
        # A name that is unknown or missing is looked up; a value's refusal says what is allowed.
        is_value = message.startswith(("argument ", "--"))
        hint = "" if is_value else f" (`{self.prog} --help` shows the usage)"
        self.exit(2, f"{self.prog}: {' '.join(message.split())}{hint}\n")


def integer(least: int = 1, most: int = _LARGEST) -> Callable[[str], int]:
    """Make a reader of integers from ``least`` to ``most``."""

    def read(value: str) -> int:
        try:
            # Python refuses a number of thousands of digits by a message of its own.
            found = int(value)
        except ValueError:
            found = None
        if found is None or not least <= found <= most:
            limit = f"of at least {least}" if most == _LARGEST else f"from {least} to {most}"
            raise Refusal(f"{_shown(value)} must be an integer {limit}.")
        return found

    return read


def add_number(
    parser: argparse._ActionsContainer,
    option: str,
    read: Callable[[str], float],
    meaning: str,
    default: float | None = None,
    metavar: str = "N",
) -> None:
    """Add an option whose value is a number; its help has the default, where there is one."""
    shown = "" if default is None else " (%(default)s)"
    parser.add_argument(
        option, type=read, default=default, metavar=metavar, help=f"{meaning}{shown}"
    )


def number(
    *, least: float = -math.inf, most: float = math.inf, above: float = -math.inf
) -> Callable[[str], float]:
    """Make a reader of finite numbers, from ``least`` to ``most`` and larger than ``above``."""
    limits = [f"above {above:g}"] if math.isfinite(above) else []
    limits += [f"of at least {least:g}"] if math.isfinite(least) else []
    limits += [f"of at most {most:g}"] if math.isfinite(most) else []

    def read(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and least <= found <= most and found > above):
            raise Refusal(f"{_shown(value)} must be a number {' and '.join(limits)}.")
        return found

    return read


def seed(value: str) -> int:
    """Read the seed of random draws."""
    return integer(*SEEDS)(value)


def temperature(value: str) -> float:
    """Read the temperature of a request: OpenAI's bounds, and the server's."""
    return number(least=0, most=2)(value)


def port(value: str) -> int:
    """Read a port that a server can listen on."""
    return integer(*_PORTS)(value)


def text(value: str) -> str:
    """Read a text that is not empty and can be sent as UTF-8."""
    if not value.strip():
        raise Refusal("it is empty; give a text.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refusal(f"{_shown(value)} must be text in UTF-8.") from None
    return value


def key(value: str) -> str:
    """Read a server's key, which a header of HTTP can hold. A refusal does not show it."""
    if not value or not value.isascii() or not value.isprintable() or value != value.strip():
        raise Refusal("the key must be printable ASCII without spaces around it.")
    return value


def url(value: str) -> str:
    """Read the root of a server, without ``/v1`` and without a slash at its end."""
    example = "must be the address of a server, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(value)
        at = parts.port
    except ValueError:
        raise Refusal(f"{_shown(value)} {example}.") from None
    is_whole = parts.scheme in ("http", "https") and parts.hostname and at != 0
    if not is_whole or not value.isprintable() or any(c.isspace() for c in value):
        raise Refusal(f"{_shown(value)} {example}.")
    if "@" in parts.netloc:
        raise Refusal(f"{example}, without a key in it: set VLLM_API_KEY.")
    if parts.query or parts.fragment:
        raise Refusal(f"{_shown(value)} {example}, without ? and #.")
    return value.rstrip("/").removesuffix("/v1").rstrip("/")


def model(value: str) -> str:
    """Read a folder of a checkpoint, a repository on the hub, or an address that vLLM loads from."""
    is_path = value.startswith(("/", ".", "~"))
    if "://" in value and value.isprintable():
        return value
    if not is_path and _REPOSITORY.fullmatch(value) and not Path(value).exists():
        return value
    path = path_of(value)
    if not is_path and not path.exists():
        raise Refusal(f"{_shown(value)} must be a folder that is there, or a repository's name.")
    # Mistral's own format has the other one.
    return str(folder_with(path, ("config.json", "params.json"), "the folder of a checkpoint"))


def named_model(methods: Callable[[str], str]) -> Callable[[str], tuple[str, str]]:
    """Make a reader of ``MODEL`` and ``METHOD=MODEL``.

    Args:
        methods: Reads the method.

    Returns:
        A function to the method, empty where none is named, and the model.
    """

    def read(value: str) -> tuple[str, str]:
        method, is_named, name = value.partition("=")
        # A path may have the sign too, a method has no slash.
        if not is_named or "/" in method:
            return "", model(value)
        return methods(method), model(name)

    return read


def path_of(value: str) -> Path:
    """Read a path, whatever is there; it may be one of another machine."""
    if not text(value).isprintable():
        raise Refusal(f"{_shown(value)} must be a path without control characters.")
    try:
        path = Path(value).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refusal(f"{_shown(value)} must be a path: {reason}.") from None
    return path


def found(path: Path, what: str) -> Path:
    """Return ``path`` if it is a file or a folder.

    Args:
        path: What must be there.
        what: What it must be; the end of a sentence.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}; it must be {what}.") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        # Reading a pipe or a device may never end.
        raise Refusal(f"{path} is neither a file nor a folder; it must be {what}.")
    return path


def folder_with(path: Path, names: Sequence[str], what: str) -> Path:
    """Return ``path`` if it is a folder that holds one of some files.

    Args:
        path: What must be such a folder.
        names: The files.
        what: What the folder must be; the end of a sentence.
    """
    if not any(os.path.isfile(path / name) for name in names):
        raise Refusal(f"{path} must be {what}; it has no {' and no '.join(names)}.")
    return path


def file(value: str) -> Path:
    """Read the path of a file that is there."""
    path = found(path_of(value), "a file")
    if path.is_dir():
        raise Refusal(f"{path} is a folder; it must be a file.")
    return path


def checked(read: Callable[[str], Any], name: str, value: str) -> Any:
    """Apply ``read`` to a value that no parser reads.

    Args:
        read: A function of this module.
        name: What the value is called on the command line.
        value: What was typed.

    Raises:
        UsageError: If ``read`` refuses it.
    """
    try:
        return read(value)
    except Refusal as error:
        raise UsageError(f"{name}: {error}") from None


def recording(value: str) -> Path:
    """Read the path of what a server recorded."""
    return found(path_of(value), "the folder that a server records to, or a file of JSON lines")


def samples(value: str) -> Path:
    """Read the path of a folder that ``calibrate extract`` wrote."""
    return folder_with(path_of(value), ("extraction.json",), "a folder of `calibrate extract`")


def draft(value: str) -> Path:
    """Read the folder of a draft on this machine."""
    return folder_with(path_of(value), ("config.json",), "the folder of a draft")


def new_folder(value: str) -> Path:
    """Read the path of a folder that is not there yet and can be made."""
    path = folder(value)
    if os.path.lexists(path):
        raise Refusal(f"{path} is there already; name a new folder.")
    return path


def folder(value: str) -> Path:
    """Read the path of a folder that can be written, there or not."""
    path = path_of(value)
    nearest = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if not nearest.is_dir():
        raise Refusal(f"{path} cannot be a folder: {nearest} is none; name a folder.")
    _check_writable(nearest)
    return path


def new_file(value: str) -> Path:
    """Read the path of a file that can be written, there or not, in a folder that is there."""
    path = path_of(value)
    if not path.absolute().parent.is_dir():
        raise Refusal(f"{path}: there is no such folder; name a file in a folder that is there.")
    if os.path.lexists(path) and not path.is_file():
        raise Refusal(f"{path} is not a file; name a file.")
    _check_writable(path if os.path.lexists(path) else path.absolute().parent)
    return path


def empty_folder(value: str) -> Path:
    """Read the path of a folder that is not there yet and can be made, or is empty."""
    path = folder(value)
    if path.is_dir() and any(path.iterdir()):
        raise Refusal(f"{path} is not empty; name a new folder.")
    return path


def layer_ids(value: str) -> list[int]:
    """Read layers of a model, such as ``1,9,17``."""
    try:
        ids = [integer(0)(part) for part in value.split(",")]
    except Refusal:
        ids = []
    if not ids or sorted(set(ids)) != ids:
        raise Refusal(f"{_shown(value)} must be ascending numbers with commas, such as 1,9,17.")
    return ids


def device(value: str) -> str:
    """Read a device of torch that this machine may have. Torch itself says whether it works."""
    if not _DEVICE.fullmatch(value):
        raise Refusal(f"{_shown(value)} must be cpu, cuda or cuda:N.")
    if value != "cpu" and not any(any(Path("/dev").glob(name)) for name in _DEVICE_NODES):
        raise Refusal(f"{value}: this machine has no such GPU; it must be cpu here.")
    return value


def schema(value: str) -> dict[str, Any]:
    """Read a JSON schema, or the file that holds one."""
    content = value
    if not value.lstrip().startswith("{"):
        path = found(path_of(value), "a JSON schema, or a file that holds one")
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(f"{_shown(value)} cannot be read: {error}.") from None
    try:
        read = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{_shown(value)} must be JSON: {error}.") from None
    if not isinstance(read, dict):
        raise Refusal(f"{_shown(value)} must be a JSON object.")
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


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise Refusal(f"{path} cannot be written; name another place.")


def _shown(value: str) -> str:
    """Shorten ``value`` so that it fits one line of a message."""
    shown = " ".join(printable(value).split()) or "an empty value"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
