"""LLaDA2.2's loop does what the publisher's does: small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.support.families import llada2, run
from tests.support.families.llada2_model import DELETE_ID, SPLIT_ID, llada2_2
from tests.support.families.model import MASK_ID, prompt_of, scripted
from tests.support.families.scripts import DELETE, END, MASK, SPLIT, blocks, row


class TestLLaDA22:
    def generate(self, scripted_model, prompt=(), **kwargs) -> run.Run:
        settings = {
            "mask_id": MASK,
            "eos_ids": (END,),
            "delete_token_id": DELETE,
            "split_token_id": SPLIT,
            "gen_length": 4,
            "block_length": 4,
            "steps": 4,
        }
        return llada2.generate_2_2(scripted_model, list(prompt), **(settings | kwargs))

    def says(self, script: Callable[[list[int]], Sequence[int]], p: float = 0.95) -> run.Model:
        """A model that says these tokens for the last block, each with probability ``p``."""

        def rows(ids: Sequence[int]) -> Tensor:
            block = list(ids[-4:])
            said = [10] * (len(ids) - 4) + list(script(block))
            return torch.stack([row(token, p) for token in said])

        return scripted(rows)

    @pytest.mark.parametrize(
        ("written", "expected", "marks"),
        [
            ([10, DELETE, 12, 13], [10, 12, 13, MASK], [0, 1, 0, 0]),
            ([10, SPLIT, 12, 13], [10, MASK, 21, 12], [0, 0, 0, 1]),
            ([DELETE, 11, SPLIT, 13], [11, MASK, 22, 13], [0, 0, 1, 0]),
            ([10, 11, 12, 13], [10, 11, 12, 13], [0, 0, 1, 0]),
            ([DELETE] * 4, [MASK] * 4, [0, 0, 0, 0]),
            ([SPLIT] * 4, [MASK, 20, MASK, 21], [0, 0, 0, 0]),
        ],
    )
    def test_apply_edits(self, written, expected, marks):
        """DELETE shifts left and fills up; SPLIT restores the old token behind a new mask."""
        tokens, original = llada2.apply_edits(
            written,
            [20, 21, 22, 23],
            [False, False, True, False],
            0,
            mask_id=MASK,
            delete_token_id=DELETE,
            split_token_id=SPLIT,
        )
        assert tokens == expected
        assert original == [bool(mark) for mark in marks]

    def test_apply_edits_leaves_the_prompt(self):
        """Also where it holds the ids themselves."""
        tokens, _ = llada2.apply_edits(
            [DELETE, SPLIT, DELETE, 13],
            [DELETE, SPLIT, 22, 23],
            [False, False, True, True],
            2,
            mask_id=MASK,
            delete_token_id=DELETE,
            split_token_id=SPLIT,
        )
        assert tokens == [DELETE, SPLIT, 13, MASK]

    def test_fill(self):
        """Above the threshold at once, then a step that changes nothing."""
        result = self.generate(self.says(lambda block: [10, 11, 12, 13]))
        assert result.tokens == [10, 11, 12, 13]
        assert [one.num_masked for one in result.passes] == [4, 0]

    def test_schedule(self):
        """Below the threshold, the step's share of the first masks; after the steps, all."""

        def script(ids: Sequence[int]) -> Tensor:
            return torch.stack([row(10 + i, 0.4 - 0.05 * i) for i in range(len(ids))])

        result = self.generate(scripted(script), steps=3, editing_threshold=0.9)
        assert result.revealed == [0, 0, 1, 2]

    def test_delete(self):
        """A filled block whose second token is deleted: the rest moves up, a mask is filled."""

        def script(block: list[int]) -> list[int]:
            if block == [10, 11, 12, 13]:
                return [10, DELETE, 12, 13]
            if MASK in block and block != [MASK] * 4:
                return [10, 12, 13, 14]
            return [10, 11, 12, 13] if MASK in block else block

        result = self.generate(self.says(script))
        assert result.tokens == [10, 12, 13, 14]
        assert [one.num_masked for one in result.passes] == [4, 0, 1, 0]

    def test_split(self):
        """A token gets a mask before it; the last token of the block falls off."""

        def script(block: list[int]) -> list[int]:
            if block == [10, 11, 12, 13]:
                return [10, SPLIT, 12, 13]
            if block == [10, MASK, 11, 12]:
                return [10, 20, 11, 12]
            return [10, 11, 12, 13] if MASK in block else block

        result = self.generate(self.says(script))
        assert result.tokens == [10, 20, 11, 12]
        assert [one.num_masked for one in result.passes] == [4, 0, 1, 0]

    def test_masks_of_edits_are_needed_at_once(self):
        """They raise a step's floor, so that they are filled below the threshold too."""
        calls = 0

        def script(ids: Sequence[int]) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                return torch.stack([row(10 + i, 0.95) for i in range(4)])
            if calls == 2:
                return torch.stack([row(token, 0.95) for token in [10, DELETE, DELETE, 13]])
            said = [10, 13, 14, 15]
            return torch.stack([row(token, 0.3) for token in said])

        result = self.generate(scripted(script), steps=1, editing_threshold=0.5)
        assert result.tokens == [10, 13, 14, 15]
        assert [one.num_masked for one in result.passes] == [4, 0, 2, 0]

    def test_final_round(self):
        """A first token that always wants to be deleted: the last post step takes its second choice."""

        def script(ids: Sequence[int]) -> Tensor:
            rows = [row(10 + i, 0.95) for i in range(4)]
            if ids[-1] != MASK:
                rows[0] = row(DELETE, 0.9, second=30)
            return torch.stack(rows)

        result = self.generate(scripted(script), max_post_steps=3)
        assert DELETE not in result.tokens
        assert MASK not in result.tokens
        assert result.tokens[0] == 30
        # Filled, three rounds without first masks of which the last is final, and no more.
        assert result.count("denoise") <= 1 + 2 * 3

    def test_no_post_steps(self):
        """The round that reveals the last of the first masks is the final one."""
        result = self.generate(
            self.says(lambda block: [10, 11, 12, 13]), gen_length=8, max_post_steps=0
        )
        assert [one.kind for one in result.passes] == ["denoise", "commit", "denoise"]

    def test_cap(self):
        """The last step allowed is a final round."""
        result = self.generate(
            self.says(lambda block: [10, 11, 12, DELETE], p=0.1), max_steps_per_block=2
        )
        assert result.count("denoise") == 2
        assert MASK not in result.tokens
        assert DELETE not in result.tokens

    def test_anti_loop(self):
        """A result that was seen before is left by the least certain change's second choice."""

        def script(ids: Sequence[int]) -> Tensor:
            # The first token swings between 10 and 11; 12 is the second choice in the swing back.
            if ids[-1] == MASK:
                return torch.stack([row(10, 0.95)] * 4)
            swing = {10: row(11, 0.7, second=13), 11: row(10, 0.6, second=12)}
            first = swing.get(ids[-4], row(ids[-4], 0.95))
            return torch.stack([first] + [row(10, 0.95)] * 3)

        result = self.generate(scripted(script))
        assert result.tokens == [12, 10, 10, 10]
        # Filled with 10; 11; back to 10, which was seen: 12; then nothing changes.
        assert result.count("denoise") == 4

    def test_escape_is_injected(self):
        """The position that is drawn again is the caller's choice; the publisher's is random."""
        asked: list[tuple[int, ...]] = []

        def escape(before: Tensor, after: Tensor, confidence: Tensor) -> int:
            asked.append(tuple((before != after).nonzero()[:, 0].tolist()))
            return asked[-1][-1]

        def script(ids: Sequence[int]) -> Tensor:
            if ids[-1] == MASK:
                return torch.stack([row(10, 0.95)] * 4)
            rows = [row(10, 0.95)] * 4
            for i in (0, 1):
                there = ids[len(ids) - 4 + i]
                rows[i] = {10: row(11, 0.7, second=13), 11: row(10, 0.6, second=12)}.get(
                    there, row(there, 0.95)
                )
            return torch.stack(rows)

        result = self.generate(scripted(script), escape=escape, max_post_steps=8)
        assert asked[0] == (0, 1)
        assert result.tokens[1] == 12

    @pytest.mark.parametrize("early", [False, True])
    def test_end_tokens(self, early):
        """Any of the ids ends what is returned."""
        result = self.generate(
            self.says(lambda block: [10, 11, 7, 13]),
            gen_length=8,
            eos_ids=(END, 7),
            eos_early_stop=early,
        )
        assert result.tokens == [10, 11, 7]
        assert len(blocks(result, "denoise")) == (1 if early else 2)

    def test_random_weights(self):
        """Whatever a model says, blocks end, without masks and without edit ids."""
        tiny = run.suppress(llada2_2(), [MASK_ID])
        result = llada2.generate_2_2(
            tiny,
            prompt_of(5),
            gen_length=40,
            mask_id=MASK_ID,
            eos_ids=(),
            delete_token_id=DELETE_ID,
            split_token_id=SPLIT_ID,
            max_post_steps=4,
            editing_threshold=0.3,
        )
        assert len(result.tokens) == 40
        assert not {MASK_ID, DELETE_ID, SPLIT_ID} & set(result.tokens)
