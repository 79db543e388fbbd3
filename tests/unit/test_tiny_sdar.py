"""The tiny SDAR's training batches and its loop, held to the published block-diffusion loop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.families import sdar
from tests.support.families.run import cut, suppress

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "checkpoints"
sys.path.insert(0, str(EXAMPLES))

from tiny_sdar import (  # noqa: E402
    BLOCK_LENGTH,
    GENERATION_CONFIG,
    MASK_ID,
    build_model,
    generate,
    hidden_states,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = build_model().eval()
    # Initial weights make all positions alike; these spread the probabilities from 0.1 to 1.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                gain = 6.0 if name.startswith("lm_head") else 1.0
                parameter.mul_(gain / parameter.std() / parameter.shape[1] ** 0.5)
    return model


def whole_sequence(model, ids, visible):
    """[T, V]: logits of one sequence under an explicit mask."""
    position = torch.arange(len(ids))
    return model.lm_head(hidden_states(model, ids[None], position[None], visible[None]))[0]


@pytest.mark.parametrize("length", [1, 8, 13, 30])
def test_generate(model, length: int) -> None:
    """The loop that scores the checkpoint gives the published loop's tokens, block by block."""
    prompt = torch.randint(24, 300, (length,), generator=torch.Generator().manual_seed(length))
    published = sdar.generate(
        suppress(lambda ids, visible: whole_sequence(model, ids, visible), [MASK_ID]),
        prompt.tolist(),
        mask_id=MASK_ID,
        gen_length=32,
        block_length=BLOCK_LENGTH,
        denoising_steps=BLOCK_LENGTH,
        temperature=0.0,
        confidence_threshold=GENERATION_CONFIG["reveal_threshold"],
        stopping_criteria_idx=GENERATION_CONFIG["eos_token_id"],
    )
    found = generate(model, prompt.tolist(), 32)
    assert found.tokens == cut(published.tokens, GENERATION_CONFIG["eos_token_id"])[:32]
    assert found.num_steps == published.count("denoise")
    assert found.num_blocks == published.count("commit")
