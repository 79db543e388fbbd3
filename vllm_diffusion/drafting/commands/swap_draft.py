"""``vllm-diffusion swap-draft``: another draft for a server that runs."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.cli import values
from vllm_diffusion.cli.client import KEY_VARIABLE, ServerError, ask
from vllm_diffusion.cli.console import table
from vllm_diffusion.drafting.accepted import LEAST, MOST
from vllm_diffusion.drafting.swap import PATH, PENDING, ROLLED_BACK

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

_SECONDS = 600.0
_POLL_SECONDS = 1.0


def ask_draft(
    arguments: argparse.Namespace, method: str = "GET", body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Ask the endpoint of a server's draft, and return its status.

    Args:
        arguments: Values of :func:`add_server`.
        method: GET, POST to have another draft take its place, or DELETE to have the old one back.
        body: The new draft, and after how many verifications it is judged.

    Raises:
        ServerError: With the server's reason; its draft is the old one.
    """
    url = arguments.url + PATH
    api_key = arguments.api_key or os.environ.get(KEY_VARIABLE)
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


def swap(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Have another draft take the served one's place, as :func:`ask_draft`."""
    return ask_draft(
        arguments, "POST", {"model": str(model), "verifications": arguments.verifications}
    )


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
    if arguments.roll_back and arguments.draft is not None:
        raise values.UsageError(
            "--roll-back takes no draft: it puts back the one that was replaced."
        )
    if arguments.roll_back:
        print(describe(ask_draft(arguments, "DELETE")))
        return 0
    if arguments.draft is None:
        status = ask_draft(arguments)
    else:
        status = swap(arguments, arguments.draft.resolve())
    if arguments.wait:
        status = wait_until_judged(arguments, status)
    print(describe(status))
    if arguments.draft is None and not arguments.wait:
        return 0
    return int(status["swap"] is not None and status["swap"]["state"] == ROLLED_BACK)


def is_pending(status: dict[str, Any]) -> bool:
    """Return whether a swap waits for its verdict."""
    return status["swap"] is not None and bool(status["swap"]["state"] == PENDING)


def wait_until_judged(arguments: argparse.Namespace, status: dict[str, Any]) -> dict[str, Any]:
    """Poll the server until no swap is pending, and return its status.

    Args:
        arguments: As of :func:`ask_draft`.
        status: As it is now.
    """
    while is_pending(status):
        time.sleep(_POLL_SECONDS)
        status = ask_draft(arguments)
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
