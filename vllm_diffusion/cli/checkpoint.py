"""``vllm-diffusion checkpoint``: paths of the shipped checkpoints; and servers on them, as soon
there as they can be.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.checkpoints import (
    DEFAULT_FAMILY,
    DRAFT_FOLDERS,
    DRAFTED_FAMILY,
    FOLDERS,
    READER,
    shipped_checkpoint,
    shipped_draft,
)
from vllm_diffusion.cli.answer import AnswerError
from vllm_diffusion.cli.client import ServerError
from vllm_diffusion.cli.console import CommandError
from vllm_diffusion.cli.server import ENDING_SIGNALS, Server, vllm_serve
from vllm_diffusion.cli.values import UsageError
from vllm_diffusion.startup.environment import is_disabled

if TYPE_CHECKING:
    from vllm_diffusion.cli.values import Parser

    Subcommands = argparse._SubParsersAction[Parser]


# Families of the checkpoints that answer questions.
_ANSWERING = tuple(name for name in FOLDERS if name != READER)


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "checkpoint",
        help="print the path of a shipped checkpoint",
        description='Print the path of a shipped checkpoint: vllm serve "$(%(prog)s)".',
    )
    add_family(parser, FOLDERS)
    parser.add_argument(
        "--draft",
        action="store_true",
        help=f"print the path of its draft instead ({', '.join(DRAFT_FOLDERS)})",
    )
    parser.set_defaults(run=run)


def add_family(
    parser: argparse.ArgumentParser,
    families: Iterable[str] = _ANSWERING,
) -> None:
    """Add the option that chooses among the shipped checkpoints; :func:`family_of` reads it.

    Args:
        parser: The command's.
        families: What it offers; those that answer questions where it is left out.
    """
    parser.add_argument(
        "--family",
        choices=tuple(families),
        help=f"which shipped checkpoint (default: {DEFAULT_FAMILY})",
    )


def family_of(arguments: argparse.Namespace) -> str:
    """Return the requested family; where its draft is requested, one that has a draft.

    Raises:
        UsageError: If the family has no draft, and one was requested.
    """
    family: str | None = arguments.family
    if not getattr(arguments, "draft", False):
        return family or DEFAULT_FAMILY
    if family not in (None, *DRAFT_FOLDERS):
        raise UsageError(
            f"--draft: the shipped checkpoint of {family} has no draft; set --family to "
            f"{' or '.join(DRAFT_FOLDERS)}, or leave it out."
        )
    return family or DRAFTED_FAMILY


def run(arguments: argparse.Namespace) -> int:
    find = shipped_draft if arguments.draft else shipped_checkpoint
    print(find(family_of(arguments)))
    return 0


# Under which the server knows the checkpoint, whichever it is.
MODEL_NAME = "tiny"
# Tokens of a prompt and its answer together.
MAX_MODEL_LEN = 1024
# The checkpoint is text and images of a few tokens; what is small here starts sooner.
_SERVE_OPTIONS = (
    *("--served-model-name", MODEL_NAME),
    *("--max-model-len", str(MAX_MODEL_LEN)),
    *("--max-num-seqs", "2"),
    # Compiling the decision step takes longer than one answer.
    "--enforce-eager",
    *("--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}'),
)
# Nothing is fetched or reported: the checkpoint is here.
SERVE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# A machine that is busy with other work may need minutes; one that failed is noticed at once.
START_SECONDS = 900.0


def begin_serving() -> None:
    """Prepare a command that starts servers: signals that end it end its servers too.

    Raises:
        CommandError: If this package is turned off, so that stock vLLM would serve.
    """
    if is_disabled():
        raise CommandError("VLLM_DIFFUSION_DISABLE=1 turns vllm-diffusion off; unset it.")
    end_with_signals()


def end_with_signals() -> None:
    """Make a signal that ends this process an interrupt, after which it cleans up."""
    for kind in ENDING_SIGNALS:
        signal.signal(kind, signal.default_int_handler)


def speculative_config(draft: Path) -> str:
    """Return ``--speculative-config`` for a DFlash draft and the whole of its blocks."""
    block_size = json.loads((draft / "config.json").read_text(encoding="utf-8"))["block_size"]
    return json.dumps(
        {"method": "dflash", "model": str(draft), "num_speculative_tokens": block_size - 1}
    )


@contextmanager
def shipped_server(
    family: str,
    say: Callable[[str], None],
    *,
    with_draft: bool = False,
    verbose: bool = False,
) -> Iterator[Server]:
    """Start a server, and stop it when the block is left.

    Args:
        family: Whose checkpoint it serves.
        say: Called with lines about progress, and with the end of the log of a server that fails.
        with_draft: Have its draft propose, and it verify.
        verbose: Print what the server prints, as it comes.

    Raises:
        InstallationError: If the installation lacks a file of the checkpoint.
        CommandError: If the server did not start or stopped, or it did not answer; the last names
            the server's log.
    """
    end_with_signals()
    checkpoint = shipped_checkpoint(family)
    options = list(_SERVE_OPTIONS)
    if with_draft:
        options += ["--speculative-config", speculative_config(shipped_draft(family))]
    server = Server(
        vllm_serve(str(checkpoint), *options),
        report=say,
        timeout=START_SECONDS,
        environment=SERVE_ENVIRONMENT,
        verbose=verbose,
    )
    drafted = " and its draft" if with_draft else ""
    say(f"Starting vLLM on {server.url} with {checkpoint}{drafted}")
    start = time.monotonic()
    try:
        with server:
            say(f"{time.monotonic() - start:5.0f} s  ready")
            yield server
    except ServerError as error:
        say(server.log_end())
        raise CommandError(
            f"{error} `vllm-diffusion doctor` lists what this machine lacks."
        ) from None
    except AnswerError as error:
        raise CommandError(f"{error} The server's log: {server.log_path}") from None
