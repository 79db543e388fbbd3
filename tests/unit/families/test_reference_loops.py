"""What the publishers' loops do alike, and where they differ in a sign."""

from __future__ import annotations

import pytest

from tests.support.families import scripts
from tests.support.families.cases import CASES, Wanted, expected
from tests.support.families.llada2_model import DELETE_ID, SPLIT_ID
from tests.support.families.model import MASK_ID, prompt_of


@pytest.mark.parametrize(
    ("loop", "name", "prompt_length", "num_at_once", "num_masks", "is_strict"),
    [
        (scripts.sdar_loop, "confidence_threshold", 0, 1, 8, True),
        (scripts.llada2_0_loop, "threshold", 0, 1, 8, True),
        # Two sub-blocks, and then two blocks.
        (scripts.fast_dllm_loop, "threshold", 1, 2, 7, True),
        (scripts.stable_diffcoder_loop, "threshold", 0, 2, 8, False),
        # A seed, and the rest of its block.
        (scripts.nemotron_loop, "threshold", 1, 1, 7, False),
    ],
)
def test_threshold(loop, name, prompt_length, num_at_once, num_masks, is_strict):
    """A probability of exactly the threshold is above it, or not; below it the best mask goes alone."""
    even = scripts.constant([scripts.row(10, 0.5, second=11)] * 9)
    for threshold, is_above in ((0.49, True), (0.5, not is_strict), (0.51, False)):
        result = loop(even, prompt_ids=[30] * prompt_length, **{name: threshold})
        assert result.count("denoise") == (num_at_once if is_above else num_masks)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("prompt_length", [1, 4, 7])
def test_random_weights(name, prompt_length):
    """Whatever a model says, blocks end, without masks; in as many steps where nothing is edited."""
    case, model = CASES[name], CASES[name].make()
    B = model.block_length
    wanted = Wanted(B + 5, temperature=0.7, editing_threshold=0.3, max_post_steps=4)
    result = expected(case, model, prompt_of(prompt_length), wanted)
    assert len(result.tokens) == B + 5
    assert MASK_ID not in result.tokens
    if name == "llada2.2":
        assert not {DELETE_ID, SPLIT_ID} & set(result.tokens)
    elif name != "llada2.1":
        assert max(scripts.blocks(result, "denoise")) <= B
