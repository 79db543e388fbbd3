"""The shipped tiny pair: its files, and how much of its draft's proposals its target keeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from vllm_diffusion.cli.checkpoint import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.reference import load_draft

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "checkpoints"))

import tiny_qwen3
import train_tiny_pair
from tiny_model import build_tokenizer
from tiny_tasks import FAMILIES

TARGET, DRAFT = shipped_checkpoint("qwen3"), shipped_draft("qwen3")


@pytest.fixture(scope="module")
def target():
    return tiny_qwen3.load_target(TARGET)


def test_files(target) -> None:
    """What the code writes, the tokenizer of the others, and at most 8 MB for both."""
    config = json.loads((TARGET / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert {name: config[name] for name in tiny_qwen3.TARGET_CONFIG} == tiny_qwen3.TARGET_CONFIG
    generation = json.loads((TARGET / "generation_config.json").read_text())
    assert generation == tiny_qwen3.SAMPLING
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (TARGET / name).read_bytes() == (shipped_checkpoint() / name).read_bytes()
    expected = json.loads(json.dumps(train_tiny_pair.new_draft(target, 3).config.to_dict()))
    found = json.loads((DRAFT / "config.json").read_text())
    # Of whichever release wrote them.
    del found["transformers_version"], expected["transformers_version"]
    assert found == expected
    files = [*TARGET.iterdir(), *DRAFT.iterdir()]
    assert sum(path.stat().st_size for path in files) < 8_000_000
    assert not [path for path in files if path.suffix == ".py"]


def test_accepted(target) -> None:
    """More than 5 of 7 proposals are kept on held-out prompts, and below 1 of a random draft's."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    random = train_tiny_pair.new_draft(target, 3).eval()
    for draft, num_prompts, is_enough in (
        (load_draft(DRAFT), 4, lambda mean: mean > 5),
        (random, 1, lambda mean: mean < 1),
    ):
        kept: list[int] = []
        for family in FAMILIES:
            kept += train_tiny_pair.accepted(target, draft, tokenizer, family, num_prompts)[0]
        assert is_enough(sum(kept) / len(kept)), sum(kept) / len(kept)
