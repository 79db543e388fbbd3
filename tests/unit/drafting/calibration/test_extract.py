"""What is replayed of a recording."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.drafting.calibration.extract import _batches, _choose
from vllm_diffusion.drafting.recording import Exchange

IDS = st.lists(st.integers(0, 9), max_size=12)


def exchange(prompt: list[int], output: list[int], time: float = 0.0) -> Exchange:
    return Exchange(array("i", prompt), array("i", output), time)


@given(
    exchanges=st.lists(st.builds(exchange, IDS, IDS.filter(bool))),
    longest=st.integers(1, 20),
    max_tokens=st.integers(0, 100),
)
def test_choice(exchanges: list[Exchange], longest: int, max_tokens: int) -> None:
    """Each once or left out for one reason; never more tokens than there is room for, none too long."""
    chosen, counts = _choose(exchanges, longest, max_tokens)
    left_out = counts["num_repeated"] + counts["num_too_long"] + counts["num_without_room"]
    assert len(chosen) + left_out == len(exchanges)
    assert sum(len(each.token_ids) for each in chosen) <= max_tokens
    assert all(2 <= len(each.token_ids) <= longest and each.output_token_ids for each in chosen)


def test_newest_first() -> None:
    """Where there is no room for all; a repeated one is not a second sample; ends are cut."""
    old, again, long = exchange([1], [2, 3]), exchange([1], [2, 3]), exchange([4], [5, 6, 7, 8])
    chosen, counts = _choose([exchange([9], [9, 9]), old, again, long], longest=4, max_tokens=7)
    assert [list(each.token_ids) for each in chosen] == [[4, 5, 6, 7], [1, 2, 3]]
    assert counts == {"num_repeated": 1, "num_too_long": 0, "num_cut": 1, "num_without_room": 1}


@given(st.lists(st.builds(exchange, IDS, IDS.filter(bool)), min_size=1), st.integers(1, 40))
def test_batches(exchanges: list[Exchange], max_tokens: int) -> None:
    """All in order; one at a time where one is larger than a batch."""
    batches = list(_batches(exchanges, max_tokens))
    assert [pair for batch in batches for pair in batch] == list(enumerate(exchanges))
    for batch in batches:
        assert len(batch) == 1 or sum(len(each.token_ids) for _, each in batch) <= max_tokens
