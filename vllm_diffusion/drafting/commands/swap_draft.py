"""``vllm-diffusion swap-draft``: another draft for a server that runs."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.cli import values
from vllm_diffusion.cli.client import KEY_VARIABLE, ServerError, ask
from vllm_diffusion.cli.console import table
from vllm_diffusion.drafting.swap import PATH

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

_SECONDS = 600.0


def ask_draft(arguments: argparse.Namespace, new: Path | None = None) -> dict[str, Any]:
    """Ask the endpoint of a server's draft, and return its answer.

    Args:
        arguments: Values of :func:`add_server`.
        new: Folder of a draft that takes the served one's place; ``None`` only asks for that.

    Raises:
        ServerError: With the server's reason; its draft is the old one.
    """
    url = arguments.url + PATH
    api_key = arguments.api_key or os.environ.get(KEY_VARIABLE)
    method, body = ("GET", None) if new is None else ("POST", {"model": str(new)})
    try:
        answer = ask(url, method=method, body=body, api_key=api_key, timeout=_SECONDS)
        if answer.is_success:
            status: dict[str, Any] = answer.json()
            return status
    except (OSError, ValueError) as error:
        raise ServerError(f"{url} does not answer: {error}") from None
    reason = f"{answer.url}: HTTP {answer.status_code} {answer.reason_phrase}"
    if answer.status_code == 404:
        reason = (
            f"{answer.url} is not there; start the server with VLLM_PLUGINS naming vllm_diffusion_draft "
            "(docs/use/drafts.md)."
        )
    elif answer.status_code == 401:
        reason = f"The server asks for its key: --api-key, or {KEY_VARIABLE}."
    else:
        with suppress(ValueError, KeyError, TypeError):
            reason = str(answer.json()["error"]["message"])
    raise ServerError(reason)


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "swap-draft",
        help="replace the draft of a running server",
        description="Replace the draft of a running server. Without a draft, print the one that is served.",
    )
    parser.add_argument(
        "draft", nargs="?", type=values.path, help="folder of the new draft, on the server"
    )
    add_server(parser)
    parser.set_defaults(run=run)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a server."""
    parser.add_argument(
        "--url",
        type=values.url,
        required=True,
        help="address of the server, such as http://127.0.0.1:8000",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key of the server; better set {KEY_VARIABLE}, since other users can read arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.draft is None:
        print(ask_draft(arguments)["model"])
    else:
        taken = ask_draft(arguments, arguments.draft.resolve())
        print(table([("draft", taken["model"]), ("before", taken["replaced"])]))
    return 0
