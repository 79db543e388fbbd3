"""``vllm-diffusion swap-draft``: another draft for a server that runs."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.cli import values
from vllm_diffusion.cli.client import KEY_VARIABLE, ServerError, ask
from vllm_diffusion.cli.console import table
from vllm_diffusion.drafting.accepted import LEAST, MOST
from vllm_diffusion.drafting.swap import PATH, PENDING, ROLLED_BACK

if TYPE_CHECKING:
    import httpx

    from vllm_diffusion.cli.checkpoint import Subcommands

_SECONDS = 600.0
_POLL_SECONDS = 1.0


class SwapError(ServerError):
    """A server that is not there or refuses. The message is for the user."""


class DraftClient:
    """Client of the endpoint of a server's draft.

    Args:
        url: Of the server's root.
        api_key: What it asks for, if it does.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url + PATH
        self._api_key = api_key or os.environ.get(KEY_VARIABLE)

    def status(self) -> dict[str, Any]:
        """Return the served draft, and the last swap."""
        return self._ask("GET")

    def swap(self, model: Path, verifications: int) -> dict[str, Any]:
        """Have another draft take its place.

        Raises:
            SwapError: With the server's reason; its draft is the old one.
        """
        return self._ask("POST", {"model": str(model), "verifications": verifications})

    def put_back(self) -> dict[str, Any]:
        """Have the old draft back.

        Raises:
            SwapError: With the server's reason.
        """
        return self._ask("DELETE")

    def _ask(self, method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = ask(
                self._url, method=method, body=body, api_key=self._api_key, timeout=_SECONDS
            )
            found: dict[str, Any] = answer.json() if answer.is_success else {}
        except (OSError, ValueError) as error:
            raise SwapError(f"{self._url} does not answer: {error}") from None
        if not answer.is_success:
            raise SwapError(_reason(answer))
        return found


def _reason(answer: httpx.Response) -> str:
    if answer.status_code == 404:
        return (
            f"{answer.url} is not there; start the server with VLLM_PLUGINS naming vllm_diffusion_draft "
            "(docs/use/drafts.md)."
        )
    if answer.status_code == 401:
        return f"The server asks for its key: --api-key, or {KEY_VARIABLE}."
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url}: HTTP {answer.status_code} {answer.reason_phrase}"


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "swap-draft",
        help="give a server that runs another draft",
        description="Have a server that runs take another draft, which it tries and puts back by itself "
        "if it is worse. Without a draft, say which one is served and what became of the last swap. The "
        "exit status is 1 where the draft was refused or put back.",
    )
    parser.add_argument(
        "draft", nargs="?", type=values.path_of, help="folder of the new draft, for the server"
    )
    add_server(parser)
    add_verifications(parser)
    parser.add_argument("--wait", action="store_true", help="until it is judged")
    parser.add_argument(
        "--roll-back",
        action="store_true",
        help="put the old draft back before the new one is judged",
    )
    parser.set_defaults(run=run)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a server."""
    parser.add_argument(
        "--url", type=values.url, required=True, help="of the server, e.g. http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--api-key",
        type=values.key,
        metavar="KEY",
        help=f"of the server; better in {KEY_VARIABLE}, since other users of a machine can read arguments",
    )


def add_verifications(parser: argparse.ArgumentParser) -> None:
    """Add the option that says when a new draft is judged."""
    meaning = "after how many of its own the new draft is judged"
    values.add_number(parser, "--verifications", values.integer(LEAST, MOST), meaning, 500)


def run(arguments: argparse.Namespace) -> int:
    client = DraftClient(arguments.url, arguments.api_key)
    if arguments.roll_back and arguments.draft is not None:
        raise values.UsageError(
            "--roll-back takes no draft: it puts back the one that was replaced."
        )
    if arguments.roll_back:
        print(describe(client.put_back()))
        return 0
    if arguments.draft is None:
        status = client.status()
    else:
        status = client.swap(arguments.draft.resolve(), arguments.verifications)
    if arguments.wait:
        status = wait_until_judged(client, status)
    print(describe(status))
    if arguments.draft is None and not arguments.wait:
        return 0
    swap = status["swap"]
    return int(swap is not None and swap["state"] == ROLLED_BACK)


def is_pending(status: dict[str, Any]) -> bool:
    """Return whether a swap waits for its verdict."""
    return status["swap"] is not None and bool(status["swap"]["state"] == PENDING)


def wait_until_judged(client: DraftClient, status: dict[str, Any]) -> dict[str, Any]:
    """Poll the server until no swap is pending, and return its status.

    Args:
        client: Of the server.
        status: As it is now.
    """
    while is_pending(status):
        time.sleep(_POLL_SECONDS)
        status = client.status()
    return status


def describe(status: dict[str, Any]) -> str:
    """Describe the endpoint's answer."""
    # As wide as `before`: a server without a swap has its draft in the same column.
    rows = [("draft ", status["model"])]
    swap = status["swap"]
    if swap is not None:
        rows += [
            ("swap", f"{swap['state']}: {swap['reason']}"),
            ("before", f"{swap['replaced']}: {_figures(swap['before'])}"),
            ("after", f"{swap['model']}: {_figures(swap['after'])}"),
        ]
    return table(rows)


def _figures(counts: dict[str, Any]) -> str:
    if not counts["verifications"]:
        return "no verifications"
    return (
        f"{counts['tokens_per_verification']:.2f} tokens a verification, standard error "
        f"{counts['standard_error']:.2f}, {counts['verifications']} verifications"
    )
