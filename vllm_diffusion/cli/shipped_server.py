"""Servers on a shipped checkpoint, as small and as soon there as they can be."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from vllm_diffusion.cli.answer import AnswerError
from vllm_diffusion.cli.checkpoint import shipped_checkpoint, shipped_draft
from vllm_diffusion.cli.client import ServerError
from vllm_diffusion.cli.console import CommandError
from vllm_diffusion.cli.server import ENDING_SIGNALS, Server, vllm_serve
from vllm_diffusion.startup.environment import environment_flags

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
_SERVE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# A machine that is busy with other work may need minutes; one that failed is noticed at once.
_START_SECONDS = 900.0


def begin_serving() -> None:
    """Prepare a command whose servers are this package's: signals that end it end its servers too.

    Raises:
        CommandError: If this package is turned off, so that stock vLLM would serve.
    """
    if environment_flags().disabled:
        raise CommandError("VLLM_DIFFUSION_DISABLE=1 turns vllm-diffusion off; unset it.")
    end_with_signals()


def end_with_signals() -> None:
    """Make a signal that ends this process an interrupt, behind which it cleans up."""
    for kind in ENDING_SIGNALS:
        signal.signal(kind, _interrupt)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


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
        CommandError: If the installation lacks a file of the checkpoint, the server did not start or
            stopped, or it did not answer; the last names the server's log.
    """
    end_with_signals()
    checkpoint = shipped_checkpoint(family)
    options = list(_SERVE_OPTIONS)
    if with_draft:
        options += ["--speculative-config", speculative_config(shipped_draft(family))]
    server = Server(
        vllm_serve(str(checkpoint), *options),
        report=say,
        timeout=_START_SECONDS,
        environment=_SERVE_ENVIRONMENT,
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
            f"{error} `vllm-diffusion doctor` says what this machine lacks."
        ) from None
    except AnswerError as error:
        raise CommandError(f"{error} The server's log: {server.log_path}") from None
