"""Stable-DiffCoder's loop does what the publisher's does: small cases worked out by hand."""

from __future__ import annotations

import pytest

from tests.support.families import model, run, stable_diffcoder
from tests.support.families.model import MASK_ID, prompt_of
from tests.support.families.scripts import END, MASK, blocks, constant, decreasing, row


class TestStableDiffcoder:
    def generate(self, scripted_model, prompt=(), **kwargs) -> run.Run:
        settings = {"mask_id": MASK, "steps": 8, "gen_length": 8, "block_length": 4}
        return stable_diffcoder.generate_block(scripted_model, list(prompt), **(settings | kwargs))

    @pytest.mark.parametrize(("threshold", "steps"), [(0.5, 1), (0.51, 4)])
    def test_threshold_is_not_strict(self, threshold, steps):
        """A probability of exactly the threshold is enough."""
        even = constant([row(10, 0.5, second=11)] * 8)
        result = self.generate(even, threshold=threshold)
        assert blocks(result, "denoise") == [steps, steps]

    def test_schedule(self):
        """Without a threshold, an even number of masks a step; fewer steps take more each."""
        result = self.generate(decreasing(8), threshold=None)
        assert result.revealed == [0, 1, 2, 3] * 2
        result = self.generate(decreasing(8), threshold=None, steps=4)
        assert result.revealed == [0, 0, 1, 1] * 2

    @pytest.mark.parametrize("prompt_length", [1, 4, 6])
    def test_length(self, prompt_length):
        """Exactly ``gen_length`` tokens: the last block is as much shorter as the first is."""
        result = self.generate(decreasing(16), [30] * prompt_length)
        assert len(result.tokens) == 8
        remainder = prompt_length % 4
        masked = [one.num_masked for one in result.passes if one.kind == "denoise"]
        assert masked[0] == 4 - remainder
        assert blocks(result, "commit") == [1] * (3 if remainder else 2)
        assert result.count("prefill") == (prompt_length >= 4)

    def test_end_token(self):
        """A full block with one ends without a commit, filled with it to its end."""
        rows = [row(10, 0.99)] * 8
        rows[1] = row(END, 0.99)
        result = self.generate(constant(rows), eos_id=END)
        assert result.tokens == [10, END, END, END]
        assert [one.kind for one in result.passes] == ["denoise"]

    def test_end_token_in_the_prompt(self):
        """It ends nothing."""
        result = self.generate(constant([row(10, 0.99)] * 12), [30, END], eos_id=END)
        assert result.tokens == [10] * 8

    def test_bad_lengths(self):
        """As in the publisher's loop; and a block may not be left with masks."""
        with pytest.raises(ValueError, match="gen_length=9"):
            self.generate(decreasing(9), gen_length=9)
        with pytest.raises(ValueError, match="steps=7"):
            self.generate(decreasing(9), steps=7)
        with pytest.raises(ValueError, match="masks are left"):
            self.generate(decreasing(8), steps=4, threshold=0.99)

    def test_random_weights(self):
        """Every block is filled in at most its steps."""
        tiny = run.suppress(model.stable_diffcoder(), [MASK_ID])
        result = self.generate(
            tiny,
            prompt_of(6),
            mask_id=MASK_ID,
            temperature=0.8,
            threshold=0.3,
            sample=run.keyed_sample(4),
        )
        assert MASK_ID not in result.tokens
        assert max(blocks(result, "denoise")) <= 4
