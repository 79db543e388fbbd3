"""Servers of the shipped autoregressive target: questions over HTTP, and the answers of
``transformers``.
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.server import Server, start_server
from vllm_diffusion.checkpoints import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.reference import ReferenceDraft, load_draft, save_draft

# A server that takes other drafts while it runs.
SWAPS = ("--weight-transfer-config", '{"backend": "safetensors"}')
SWAPS_PLUGINS = "vllm_diffusion,vllm_diffusion_cpu,vllm_diffusion_metrics,vllm_diffusion_draft"

QUESTIONS = [
    f"Count from {first} to {last}." for first, last in ((3, 12), (1, 9), (20, 33), (5, 17))
] + [f"Reverse {word}." for word in ("cat", "table", "horse", "window")]
MAX_TOKENS = 64
# No two requests share a block of the cache.
_salts = itertools.count()


def dflash(draft: Path | None = None) -> dict[str, Any]:
    """Return ``speculative_config`` of the shipped draft, or of another one of its shape."""
    return {"method": "dflash", "model": str(draft or shipped_draft()), "num_speculative_tokens": 7}


def save_random_draft(folder: Path) -> Path:
    """Return the folder of an untrained draft of the shipped one's shape."""
    torch.manual_seed(0)
    save_draft(ReferenceDraft(load_draft(shipped_draft()).config), folder)
    return folder


@contextmanager
def serving(
    folder: Path,
    spec: dict[str, Any],
    drafting: dict[str, Any] | None = None,
    options: tuple[str, ...] = (),
    **variables: str,
) -> Iterator[Server]:
    """A server of the shipped target with a draft, whose log is in ``folder``.

    Args:
        folder: That the log is written to; made if absent.
        spec: Its ``--speculative-config``.
        drafting: Settings of drafts.
        options: Others of ``vllm serve``.
        variables: Of its environment.
    """
    folder.mkdir(exist_ok=True)
    options = ("--speculative-config", json.dumps(spec), *options)
    if drafting:
        options += ("--additional-config", json.dumps({"drafting": drafting}))
    with start_server(shipped_checkpoint("qwen3"), folder / "log", *options, **variables) as server:
        yield server


def greedy_answers() -> dict[str, list[int]]:
    """Return token ids by question, from a model without a draft."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shipped_checkpoint("qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        output = model.generate(prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        found[question] = output[0, prompt.shape[1] :].tolist()
    return found


def greedy_answer(server: Server, question: str, **headers: str) -> list[int]:
    """Return the token ids of a greedy answer."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "return_token_ids": True,
        "cache_salt": str(next(_salts)),
    }
    answer = server.post("/v1/chat/completions", body, **headers)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
