"""``vllm serve`` with an autoregressive target and a draft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import drafts
from tests.support.checkpoints import SHIPPED
from tests.support.draft_engine import NUM_DRAFTS, prompt_of
from tests.support.server import start_server, stop_server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

# Of the shipped tokenizer.
VOCAB = {"vocab_size": 320}


def saved(folder: Path) -> tuple[Any, Path, str]:
    """A target with a tokenizer, its folder, and what ``--speculative-config`` takes."""
    model = drafts.target_model("qwen3", **VOCAB)
    model.save_pretrained(folder / "target")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SHIPPED / name, folder / "target" / name)
    dflash = {"mask_token_id": VOCAB["vocab_size"] - 1, "target_layer_ids": [0, 1]}
    draft = drafts.save_draft(folder / "draft", **VOCAB, dflash_config=dflash)
    spec = {"method": "dflash", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    return model, folder / "target", json.dumps(spec)


def test_server(tmp_path: Path) -> None:
    """Greedy answers over HTTP, and what /metrics counts."""
    model, target, spec = saved(tmp_path)
    settings = '{"drafting": {"steps": 2}}'
    options = ("--speculative-config", spec, "--additional-config", settings)
    server = start_server(target, tmp_path / "log", *options)
    try:
        for length in (3, 60):
            prompt = prompt_of(length, seed=length)
            body = {
                "prompt": prompt,
                "max_tokens": 20,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = server.post("/v1/completions", body).json()
            expected = drafts.greedy_tokens(model, prompt, 20)
            assert answer["choices"][0]["token_ids"] == expected
        verified = server.metric("vllm:spec_decode_num_drafts_total")
        assert verified > 0
        drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
        assert drafted == NUM_DRAFTS * verified
    finally:
        stop_server(server)


def test_refusals_are_one_line(tmp_path: Path) -> None:
    """More passes than positions: said before anything is loaded, without a trace."""
    _, target, spec = saved(tmp_path)
    options = ("--speculative-config", spec, "--additional-config", '{"drafting": {"steps": 9}}')
    with pytest.raises(RuntimeError) as refused:
        start_server(target, tmp_path / "log", *options)
    log = str(refused.value)
    assert log.rstrip().splitlines()[-1].startswith("vllm-diffusion: --additional-config")
    assert "steps=9 is not possible" in log
    assert "set steps to 1..7" in log
    assert "Traceback" not in log
    assert "Loading weights" not in log
