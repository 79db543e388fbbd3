"""SDAR's loop does what the publisher's does: small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.families import model, run, sdar
from tests.support.families.model import MASK_ID, prompt_of, scripted
from tests.support.families.scripts import END, MASK, blocks, constant, decreasing, row


class TestSdar:
    def generate(self, scripted_model, prompt=(), **kwargs) -> run.Run:
        settings = {
            "mask_id": MASK,
            "gen_length": 8,
            "block_length": 8,
            "denoising_steps": 8,
            "temperature": 0.0,
        }
        return sdar.generate(scripted_model, list(prompt), **(settings | kwargs))

    @pytest.mark.parametrize(("threshold", "steps"), [(0.5, 8), (0.49, 1)])
    def test_threshold_is_strict(self, threshold, steps):
        """A probability of exactly the threshold is not above it."""
        even = constant([row(10, 0.5, second=11)] * 8)
        result = self.generate(even, confidence_threshold=threshold)
        assert result.count("denoise") == steps
        assert result.tokens == [10] * 8

    def test_dynamic(self):
        """Everything above the threshold, or the schedule's number where that is more."""
        result = self.generate(decreasing(8), confidence_threshold=0.77)
        assert result.revealed == [0, 0, 0, 1, 2, 3, 4, 5]
        assert result.tokens == list(range(10, 18))
        few = self.generate(decreasing(8), confidence_threshold=0.77, denoising_steps=2)
        assert few.revealed == [0, 0, 0, 0, 1, 1, 1, 1]

    def test_static(self):
        """The schedule's number of the most confident, whatever the threshold."""
        reverse = constant([row(10, 0.3 + 0.05 * i) for i in range(8)])
        result = self.generate(
            reverse,
            denoising_steps=3,
            remasking_strategy="low_confidence_static",
            confidence_threshold=0.0,
        )
        assert result.revealed == [2, 2, 1, 1, 1, 0, 0, 0]

    def test_sequential(self):
        """From left to right, whatever is more certain."""
        reverse = constant([row(10, 0.3 + 0.05 * i) for i in range(8)])
        result = self.generate(reverse, denoising_steps=3, remasking_strategy="sequential")
        assert result.revealed == [0, 0, 0, 1, 1, 1, 2, 2]

    def test_prompt_remainder(self):
        """The prompt's last tokens are the first block's, fixed; blocks start at multiples."""
        result = self.generate(
            decreasing(24, by=0.02), prompt=[30] * 10, gen_length=9, confidence_threshold=0.0
        )
        assert [(one.kind, one.start) for one in result.passes] == [
            ("prefill", 0),
            ("denoise", 8),
            ("commit", 8),
            ("denoise", 16),
            ("commit", 16),
        ]
        assert result.passes[1].num_masked == 6
        assert result.tokens == list(range(20, 34))

    def test_decided_positions_stay(self):
        """More to reveal than masks are left: the prompt's tokens are not touched."""
        seen: list[list[int]] = []

        def script(ids: Sequence[int]) -> Tensor:
            seen.append(list(ids))
            return torch.stack([row(10, 0.9)] * len(ids))

        result = self.generate(
            scripted(script), prompt=[30, 31, 32], gen_length=5, block_length=4, denoising_steps=1
        )
        assert result.tokens == [10] * 5
        assert seen[-1][:4] == [30, 31, 32, 10]

    def test_end_token(self):
        """Looked for when the block is finished and committed; its block is returned whole."""
        rows = [row(10, 0.9)] * 16
        rows[1] = row(END, 0.9)
        result = self.generate(
            constant(rows),
            gen_length=16,
            block_length=4,
            denoising_steps=4,
            stopping_criteria_idx=[END],
        )
        assert result.tokens == [10, END, 10, 10]
        assert result.passes[-1].kind == "commit"
        endless = self.generate(constant(rows), gen_length=16, block_length=4, denoising_steps=4)
        assert len(endless.tokens) == 16

    def test_probability_is_of_the_filtered_draw(self):
        """With one token left by ``top_k`` its probability is 1, however flat the logits are."""
        flat = constant([row(10, 0.1)] * 8)
        result = self.generate(flat, temperature=1.0, top_k=1, confidence_threshold=0.99)
        assert result.count("denoise") == 1
        assert result.tokens == [10] * 8

    def test_temperature_zero_ignores_filters(self):
        """There the probability is the plain one."""
        flat = constant([row(10, 0.1)] * 8)
        result = self.generate(flat, temperature=0.0, top_k=1, confidence_threshold=0.99)
        assert result.count("denoise") == 8

    def test_drawn_mask_is_an_error(self):
        """Masks that are left after the last step are not returned."""
        masks = constant([row(MASK, 0.9)] * 8)
        with pytest.raises(ValueError, match="mask token was drawn"):
            self.generate(masks)
        result = self.generate(run.suppress(masks, [MASK]))
        assert MASK not in result.tokens

    def test_unknown_strategy(self):
        """Named, where the publisher's ``entropy_bounded`` would run into an unassigned name."""
        with pytest.raises(ValueError, match="entropy_bounded"):
            self.generate(decreasing(8), remasking_strategy="entropy_bounded")

    @pytest.mark.parametrize("strategy", ["low_confidence_dynamic", "sequential"])
    @pytest.mark.parametrize("prompt_length", [1, 4, 7])
    def test_passes_of_random_weights(self, strategy, prompt_length):
        """Every block is filled in at most its steps, and forwarded once more."""
        tiny = run.suppress(model.sdar(), [MASK_ID])
        result = sdar.generate(
            tiny,
            prompt_of(prompt_length),
            mask_id=MASK_ID,
            gen_length=12,
            block_length=4,
            denoising_steps=4,
            temperature=0.7,
            top_p=0.9,
            confidence_threshold=0.3,
            remasking_strategy=strategy,
            sample=run.keyed_sample(3),
        )
        assert MASK_ID not in result.tokens
        assert blocks(result, "commit") == [1] * len(blocks(result, "denoise"))
        assert max(blocks(result, "denoise")) <= 4
        assert -1 not in result.revealed
