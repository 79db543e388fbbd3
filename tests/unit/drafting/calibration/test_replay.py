"""Replaying an answer counts what speculative decoding of the same answer counted."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from tests.support.drafts import features
from vllm_diffusion.cli.checkpoint import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.calibration.replay import replay
from vllm_diffusion.drafting.calibration.samples import Sample
from vllm_diffusion.drafting.reference import (
    ReferenceDraft,
    draft_config,
    load_draft,
    spec_generate,
)

PROMPTS = ([2, 9, 33, 80, 81, 12], [2, 50, 60, 70])


def sample_of(target: Any, draft: ReferenceDraft, tokens: list[int], start: int) -> Sample:
    rows = features(target, tokens, draft.target_layer_ids)
    return Sample(torch.tensor(tokens), rows.unflatten(1, (len(draft.target_layer_ids), -1)), start)


def test_replay() -> None:
    """The shipped pair: the same verifications, but for the last one, which may pass the end."""
    target = Qwen3ForCausalLM.from_pretrained(shipped_checkpoint("qwen3"), dtype=torch.float32)
    trained = load_draft(shipped_draft())
    random = ReferenceDraft(
        draft_config(target.config, num_layers=1, block_size=8, mask_token_id=trained.mask_token_id)
    ).eval()
    parts = target.get_input_embeddings(), target.get_output_embeddings()
    found = {}
    for draft in (trained, random):
        samples, expected = [], []
        for prompt in PROMPTS:
            said = spec_generate(target.eval(), draft, torch.tensor([prompt]), 40)
            samples.append(sample_of(target, draft, prompt + said.tokens, len(prompt)))
            # Every verification stands at the sum of those before it.
            *whole, last = said.accepted
            expected += whole
            expected.append(min(last, 39 - sum(kept + 1 for kept in whole)))
        found[draft] = replay(draft, *parts, samples)
        assert found[draft] == Verifications.of(expected, draft.block_size - 1)
    assert found[trained].is_better_than(found[random])
    assert not found[random].is_better_than(found[trained])
