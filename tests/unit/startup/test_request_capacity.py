"""How many requests run at once by default: no more than a pass holds, beside prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.startup.passes import FEWEST, PROMPTS_SHARE, choose_max_num_seqs

counts = st.integers(1, 2048)


@given(canvases=counts, most=counts)
def test_choose_max_num_seqs(canvases: int, most: int) -> None:
    """The number is in range, and leaves prompts their share, unless stock's is the larger one."""
    chosen = choose_max_num_seqs(canvases, most)
    assert 1 <= chosen <= min(canvases, most)
    assert chosen >= min(canvases, most, FEWEST)
    if chosen > FEWEST:
        # So much of a pass is left to prompts, however many run.
        assert canvases - chosen >= canvases // PROMPTS_SHARE
    assert choose_max_num_seqs(canvases + 1, most) >= chosen


@pytest.mark.parametrize(
    ("budget", "expected"), [(2048, 8), (8192, 24), (16384, 48)], ids=["small", "server", "offline"]
)
def test_default_of_known_passes(budget: int, expected: int) -> None:
    """Canvases of 256, with vLLM's sizes of a pass."""
    assert choose_max_num_seqs(budget // 256, 1024) == expected
