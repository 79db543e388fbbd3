"""Tests of A2D over HTTP: both ways of training, and its bodies, in ``vllm serve``."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engines.server import MODEL, start_server
from tests.support.families import makers as tiny
from tests.support.families.cases import CASES, Wanted, expected, mdlm_case
from tests.support.families.model import prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SERVED = {
    "mdlm": CASES["mdlm"],
    "mdlm on qwen2": mdlm_case(tiny.a2d_qwen2, "A2DQwen2MDLM", is_shifted=False),
    "mdlm on llama, shifted": mdlm_case(tiny.a2d_llama, "A2DLlamaMDLM", is_shifted=True),
    "bd3lm on qwen2": replace(CASES["a2d"], make=tiny.a2d_qwen2),
    "bd3lm on llama": replace(CASES["a2d"], make=tiny.a2d_llama),
}


@pytest.mark.parametrize("name", SERVED)
def test_completions(name: str, tmp_path: Path) -> None:
    """Requests that are sent at once get the tokens of the publisher's loop, streamed or whole."""
    case = SERVED[name]
    model = case.make()
    wanted = [
        Wanted(max_tokens=24 + i, temperature=0.7 * (i % 2), strategy="static", seed=i)
        for i in range(6)
    ]
    prompts = [prompt_of(3 + 11 * i, seed=i) for i in range(len(wanted))]

    def ask(i: int) -> list[int]:
        body = wanted[i].plain() | {"model": MODEL, "return_token_ids": True, "stream": i >= 3}
        body |= {"prompt": prompts[i], "vllm_xargs": body.pop("extra_args")}
        del body["detokenize"]
        response = server.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        if not body["stream"]:
            return response.json()["choices"][0]["token_ids"]
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return [token for choice in choices for token in choice["token_ids"] or ()]

    folder = model.save(tmp_path / "checkpoint")
    log = tmp_path / "server.log"
    with (
        start_server(folder, log, "--max-model-len", "192", *case.words) as server,
        ThreadPoolExecutor(len(wanted)) as pool,
    ):
        answers = list(pool.map(ask, range(len(wanted))))
    for prompt, one, answer in zip(prompts, wanted, answers, strict=True):
        assert answer == expected(case, model, prompt, one).tokens, one
