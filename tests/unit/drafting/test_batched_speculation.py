"""The two ways of speculating in a batch: the tokens of no draft, and caches that hold what they should."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.support.drafts import greedy_tokens, target_model

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "drafting"))

from batched_speculation import REMEDIES, per_sequence, synchronised

VOCAB = 24
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11, 12, 13], [1], [20, 21, 5, 5, 6]]
WAYS = {"per sequence": per_sequence}
WAYS |= {remedy: partial(synchronised, remedy=remedy) for remedy in REMEDIES}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def language_model(seed: int, vocab_size: int = VOCAB) -> Qwen3ForCausalLM:
    return target_model("qwen3", seed, vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2)


@pytest.fixture(scope="module")
def target():
    return language_model(0)


@pytest.fixture(scope="module")
def draft(target):
    """Agrees with the target often, and not always."""
    model = language_model(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@ways
@pytest.mark.parametrize("num_proposals", [1, 4])
def test_greedy(way, num_proposals: int, target, draft) -> None:
    """Every row's tokens are those of the target alone, and rows differ in what they accept."""
    found = way(target, draft, PROMPTS, 24, num_proposals=num_proposals)
    assert found.tokens == [greedy_tokens(target, prompt, 24) for prompt in PROMPTS]
    blocks = [block for block in found.accepted if len(block) > 1]
    assert any(len(set(block)) > 1 for block in blocks)
    assert any(num_proposals in block for block in blocks)
    assert 1 < found.block_efficiency < num_proposals + 1


@ways
def test_stops(way, target, draft) -> None:
    """A row ends at its stop token, in the middle of a block too; the others go on without it."""
    whole = [greedy_tokens(target, prompt, 24) for prompt in PROMPTS]
    for stop in {token for tokens in whole for token in tokens[2:9]}:
        found = way(target, draft, PROMPTS, 24, num_proposals=4, stop_token_ids=(stop,))
        ends = [row.index(stop) + 1 if stop in row else 24 for row in whole]
        assert found.tokens == [row[:end] for row, end in zip(whole, ends, strict=True)]
