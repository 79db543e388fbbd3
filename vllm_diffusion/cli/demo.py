"""``vllm-diffusion demo``: one answer from a real server on a shipped checkpoint."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_diffusion.cli.checkpoint import add_family, shipped_checkpoint
from vllm_diffusion.cli.server import Server, ServerError, vllm_serve
from vllm_diffusion.settings.environment import environment_flags

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

# What each family's checkpoint is asked if the user asks nothing: something it has learnt.
DEFAULT_PROMPTS = {
    "diffusion_gemma": "What is 7+8?",
    "sdar": "Number these words: cat, dog, tree.",
}
# Under which the server knows the checkpoint, whichever it is.
MODEL_NAME = "tiny"
# The checkpoint is text and images of a few tokens; what is small here starts sooner.
_SERVE_OPTIONS = (
    *("--served-model-name", MODEL_NAME),
    *("--max-model-len", "1024"),
    *("--max-num-seqs", "2"),
    # Compiling the decision step takes longer than one answer.
    "--enforce-eager",
    *("--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}'),
)
# Nothing is fetched or reported: the checkpoint is here.
_SERVE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Closing the terminal or ending this process ends the server too.
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# A machine that is busy with other work may need minutes; one that failed is noticed at once.
_START_SECONDS = 900.0
_ANSWER_SECONDS = 300.0
_COUNTERS_SECONDS = 10.0


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "demo",
        help="start a server on a shipped checkpoint, ask it, stop it",
        description="Start a real vLLM server on a shipped checkpoint, ask it one question over "
        "the OpenAI API, print the answer and what it took, and stop the server.",
    )
    defaults = ", ".join(f'"{prompt}" ({name})' for name, prompt in DEFAULT_PROMPTS.items())
    parser.add_argument("prompt", nargs="?", help=f"default: {defaults}")
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="longest answer, in tokens (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random draws (%(default)s)")
    add_family(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Answer:
    """What the server said.

    Attributes:
        text: The whole answer, as it was printed.
        num_tokens: Its length in tokens, as the server counts.
        seconds: From sending the request to the last token.
    """

    text: str
    num_tokens: int
    seconds: float


def run(arguments: argparse.Namespace) -> int:
    prompt = arguments.prompt
    if prompt is None:
        prompt = DEFAULT_PROMPTS[arguments.family]
    if not prompt.strip():
        return _fail("The prompt is empty; ask something.")
    if environment_flags().disabled:
        return _fail("VLLM_DIFFUSION_DISABLE=1 turns vllm-diffusion off; unset it.")
    for kind in _ENDING_SIGNALS:
        signal.signal(kind, _interrupt)
    try:
        checkpoint = shipped_checkpoint(arguments.family)
    except FileNotFoundError as error:
        return _fail(str(error))
    server = Server(
        vllm_serve(str(checkpoint), *_SERVE_OPTIONS),
        report=_say,
        timeout=_START_SECONDS,
        environment=_SERVE_ENVIRONMENT,
    )
    _say(f"Starting vLLM on {server.url} with {checkpoint}")
    start = time.monotonic()
    try:
        with server:
            _say(f"{time.monotonic() - start:5.0f} s  ready; asking: {prompt}")
            answer = ask(server, prompt, arguments.max_tokens, arguments.seed)
            counters = counters_of_answer(server)
    except ServerError as error:
        _say(f"The end of the server's log, {server.log_path}:\n{server.log_tail()}\n")
        return _fail(f"{error} `vllm-diffusion doctor` says what this machine lacks.")
    except AnswerError as error:
        return _fail(f"{error} The server's log: {server.log_path}")
    _say("\n".join(report(answer, counters)))
    if not answer.text.strip():
        return _fail("The answer is empty.")
    return 0


class AnswerError(Exception):
    """The server is there but did not answer. The message is for the user."""


def ask(server: Server, prompt: str, max_tokens: int, seed: int) -> Answer:
    """Stream the answer to standard output as it arrives.

    Raises:
        AnswerError: If the server refuses the request or breaks off.
    """
    from openai import DefaultHttpxClient, OpenAI

    client = OpenAI(
        base_url=f"{server.url}/v1",
        api_key=server.api_key,
        timeout=_ANSWER_SECONDS,
        max_retries=0,
        # The server is on this machine: a proxy of the environment is not for it.
        http_client=DefaultHttpxClient(trust_env=False),
    )
    text, num_tokens = "", 0
    start = end = time.monotonic()
    try:
        chunks = client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            seed=seed,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                piece = printable(choice.delta.content or "")
                end = time.monotonic()
                text += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
    except Exception as error:
        # While a stream is read, errors of the HTTP library come through the client as they are.
        raise AnswerError(f"The server did not answer: {error}") from error
    finally:
        if text:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return Answer(text, num_tokens, end - start)


def printable(text: str) -> str:
    """``text`` without the control characters that could steer a terminal."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def counters_of_answer(server: Server) -> dict[str, float]:
    """The server's counters once the request is in them, a moment after its last token."""
    deadline = time.monotonic() + _COUNTERS_SECONDS
    while True:
        counters = server.counters()
        if counters.get("vllm:request_success_total", 0) or time.monotonic() > deadline:
            return counters
        time.sleep(0.1)


def report(answer: Answer, counters: dict[str, float]) -> list[str]:
    """Aligned lines about what the answer took. The server answered nothing else before."""
    passes = counters.get("vllm_diffusion:passes_total", 0.0)
    steps = counters.get("vllm_diffusion:denoise_steps_total", 0.0)
    canvases = counters.get("vllm_diffusion:canvases_total", 0.0)
    rows: list[tuple[str, str]] = []
    if canvases and passes:
        rows = [
            (
                "denoise steps per canvas",
                f"{steps / canvases:.1f}  ({steps:.0f} steps, {_count(canvases, 'canvas', 'canvases')})",
            ),
            (
                "tokens per pass",
                f"{answer.num_tokens / passes:.1f}  ({_count(answer.num_tokens, 'token')}, "
                f"{passes:.0f} passes: prompt and denoise steps)",
            ),
        ]
    if answer.seconds > 0:
        rows.append(
            (
                "tokens per second",
                f"{answer.num_tokens / answer.seconds:.1f}  ({answer.seconds:.2f} s, "
                "first request of a cold server)",
            )
        )
    stock = [
        f"{counters[name]:.0f} {words}"
        for name, words in (
            ("vllm:diffusion_num_denoising_steps_total", "passes over canvases"),
            ("vllm:diffusion_num_canvas_positions_total", "positions"),
            ("vllm:diffusion_num_committed_tokens_total", "committed tokens"),
        )
        if name in counters
    ]
    if stock:
        rows.append(("vLLM's own counters", ", ".join(stock)))
    width = max(len(name) for name, _ in rows) if rows else 0
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def _count(number: float, singular: str, plural: str | None = None) -> str:
    return f"{number:.0f} {singular if number == 1 else plural or singular + 's'}"


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(message: str) -> int:
    _say(message)
    return 1
