"""Questions to the shipped autoregressive target, over HTTP, and what ``transformers`` answers."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import torch

from tests.support.server import MODEL, Server
from vllm_diffusion.cli.checkpoint import shipped_checkpoint

QUESTIONS = [
    f"Count from {first} to {last}." for first, last in ((3, 12), (1, 9), (20, 33), (5, 17))
] + [f"Reverse {word}." for word in ("cat", "table", "horse", "window")]
MAX_TOKENS = 64
# No two requests share a block of the cache.
_salts = itertools.count()


def greedy_answers() -> dict[str, list[int]]:
    """Token ids by question, of a model that knows of no draft."""
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
    """Token ids of a greedy answer."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "return_token_ids": True,
        "cache_salt": str(next(_salts)),
    }
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=300
    )
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
