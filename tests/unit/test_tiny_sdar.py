"""The tiny SDAR's training batches and its loop, held to the published block-diffusion loop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.families import sdar
from tests.support.families.run import block_causal, cut, suppress

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
from train_tiny_sdar import make_batch, noise  # noqa: E402

# Within the first block, at its border, beyond it.
LENGTHS = ((3, 4), (8, 8), (13, 21), (21, 1))


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


def rows():
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randint(24, 300, (n,), generator=generator).tolist() for n in lengths)
        for lengths in LENGTHS
    ]


@torch.no_grad()
def test_batch_logits(model) -> None:
    """A noised block beside its conversation has the logits it has behind the clean blocks alone."""
    torch.manual_seed(2)
    batch = make_batch(rows(), 2)
    hidden = hidden_states(model, batch.ids, batch.position, batch.visible)
    checked = 0
    for b, (prompt, answer) in enumerate(rows()):
        start = len(prompt) // BLOCK_LENGTH * BLOCK_LENGTH
        end = -(-(len(prompt) + len(answer)) // BLOCK_LENGTH) * BLOCK_LENGTH
        for at in range(end, end + 2 * (end - start), BLOCK_LENGTH):
            block = slice(at, at + BLOCK_LENGTH)
            first = int(batch.position[b, at])
            assert first % BLOCK_LENGTH == 0
            ids = torch.cat([batch.ids[b, :first], batch.ids[b, block]])
            expected = whole_sequence(model, ids, block_causal(len(ids), BLOCK_LENGTH))
            found = model.lm_head(hidden[b, block])
            torch.testing.assert_close(found, expected[first:], rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked == 2 * sum(-(-(p % BLOCK_LENGTH + a) // BLOCK_LENGTH) for p, a in LENGTHS)


def test_batch_targets() -> None:
    """Masks hide the answer and the end tokens that fill its block, never the prompt."""
    torch.manual_seed(3)
    batch = make_batch(rows(), 3)
    assert torch.equal(batch.ids == MASK_ID, batch.masked)
    restored = batch.ids.clone()
    restored[batch.masked] = batch.target
    for b, (prompt, answer) in enumerate(rows()):
        conversation = torch.tensor(prompt + answer)
        is_real = restored[b] != GENERATION_CONFIG["pad_token_id"]
        position = batch.position[b][is_real]
        filled = torch.full((int(position.max()) + 1,), GENERATION_CONFIG["eos_token_id"][0])
        filled[: len(conversation)] = conversation
        assert torch.equal(restored[b][is_real], filled[position])
        assert int(batch.position[b][batch.masked[b]].min()) >= len(prompt)


def test_noise() -> None:
    """Every block has a mask, the prompt's remainder none, and half of the rest is masked."""
    torch.manual_seed(4)
    masks = torch.stack([noise(3 * BLOCK_LENGTH, 5) for _ in range(4000)])
    assert not masks[:, :5].any()
    assert masks.unflatten(1, (3, BLOCK_LENGTH)).any(-1).all()
    assert masks[:, BLOCK_LENGTH:].float().mean().item() == pytest.approx(0.5, abs=0.02)


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
