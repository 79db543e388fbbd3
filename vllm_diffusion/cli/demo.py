"""``vllm-diffusion demo``: one answer from a real server on a shipped checkpoint."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from vllm_diffusion.cli import values
from vllm_diffusion.cli.answer import Answer, count, display_for, stream_answer
from vllm_diffusion.cli.checkpoint import (
    MAX_MODEL_LEN,
    MODEL_NAME,
    add_family,
    begin_serving,
    family_of,
    shipped_server,
)
from vllm_diffusion.cli.client import metrics_after, openai_client, totals
from vllm_diffusion.cli.console import add_verbose, fail, say, table

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

# What each family's checkpoint gets if the user gives no prompt: something it has learnt.
DEFAULT_PROMPTS = {
    "diffusion_gemma": "What is 7+8?",
    "sdar": "Number these words: cat, dog, tree.",
    "qwen3": "Count from 3 to 12.",
}
_COUNTERS_SECONDS = 10.0


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "demo",
        help="start a server on a shipped checkpoint, ask it, stop it",
        description="Start a real vLLM server on a shipped checkpoint, ask it one question over "
        "the OpenAI API, show the answer and what it took, and stop the server. In a terminal the canvas "
        "is drawn while it is denoised.",
    )
    defaults = ", ".join(f'"{prompt}" ({name})' for name, prompt in DEFAULT_PROMPTS.items())
    parser.add_argument("prompt", nargs="?", help=f"default: {defaults}")
    longest = values.integer(1, MAX_MODEL_LEN - 1)
    values.add_number(parser, "--max-tokens", longest, "longest answer, in tokens", 256)
    values.add_number(parser, "--seed", values.seed, "seed of the random draws", 0)
    add_family(parser)
    parser.add_argument(
        "--draft",
        action="store_true",
        help="ask a tiny autoregressive model twice, by itself and with its draft, and compare",
    )
    add_verbose(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    family = family_of(arguments)
    prompt = arguments.prompt or DEFAULT_PROMPTS[family]
    begin_serving()
    request = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
    }
    texts = []
    for with_draft in (False, True) if arguments.draft else (False,):
        with shipped_server(
            family, say, with_draft=with_draft, verbose=arguments.verbose
        ) as server:
            say(f"         asking: {prompt}")
            client = openai_client(server.url, server.api_key)
            answer = stream_answer(client, request, display_for(sys.stdout))
            counters = totals(metrics_after(server.url, 1, _COUNTERS_SECONDS))
        say(report(answer, counters))
        texts.append(answer.text)
    if not texts[0].strip():
        return fail("The answer is empty.")
    if arguments.draft:
        if texts[0] != texts[1]:
            return fail("The model's answer changed with its draft; both must be equal.")
        say("The same answer with the draft and without.")
    return 0


def report(answer: Answer, counters: dict[str, float]) -> str:
    """Describe what the answer took, by the counters of a server that answered nothing else
    before.
    """
    passes = counters.get("vllm_diffusion:passes_total", 0.0)
    steps = counters.get("vllm_diffusion:denoise_steps_total", 0.0)
    canvases = counters.get("vllm_diffusion:canvases_total", 0.0)
    rows: dict[str, str] = {}
    if canvases and passes:
        rows["denoise steps per canvas"] = (
            f"{steps / canvases:.1f}  ({steps:.0f} steps, {count(canvases, 'canvas', 'canvases')})"
        )
        rows["tokens per pass"] = (
            f"{answer.num_tokens / passes:.1f}  ({count(answer.num_tokens, 'token')}, "
            f"{passes:.0f} passes: prompt and denoise steps)"
        )
    if verifications := counters.get("vllm:spec_decode_num_drafts_total"):
        kept = counters["vllm:spec_decode_num_accepted_tokens_total"]
        proposed = counters["vllm:spec_decode_num_draft_tokens_total"]
        rows["tokens per verification"] = (
            f"{1 + kept / verifications:.1f}  ({count(verifications, 'verification')}, "
            f"{kept:.0f} of {proposed:.0f} proposals kept)"
        )
    if answer.seconds > 0:
        rows["tokens per second"] = (
            f"{answer.num_tokens / answer.seconds:.1f}  ({answer.seconds:.2f} s, "
            "first request of a cold server)"
        )
    return table(rows.items(), indent="  ")
