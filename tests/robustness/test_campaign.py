"""A short campaign on the shared server; a long one is a command (``campaign.py``)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.robustness.campaign import Tally, describe, run_round
from tests.robustness.minimise import minimise
from tests.robustness.requests import draw_request
from tests.support.server import Server

SEED = 20
NUM_REQUESTS = 180


@pytest.mark.engine
def test_short_campaign(server: Server) -> None:
    """Requests of every kind are answered, refused or left, and leave the server as it was."""
    tally = Tally()
    served = describe(server, images=False)
    print(f"\nseed {SEED}")
    run_round(server, served, SEED, range(NUM_REQUESTS), tally, compared=8)
    print(tally.table())
    assert not tally.failures, "\n".join(map(str, tally.failures))
    # A campaign that says little of what it is meant for proves little.
    sent = tally.counts.total()
    assert sent == NUM_REQUESTS
    for sort in ("answered", "refused", "aborted"):
        assert sum(tally.counts[kind, sort] for kind in ("valid", "edge", "hostile")) > sent // 50
    assert tally.num_compared == 8


@pytest.mark.engine
def test_campaign_repeats_itself(server: Server) -> None:
    """A request of a campaign is the same whenever and with whatever others it is drawn."""
    served = describe(server, images=True)
    first = [draw_request(served, 3, number) for number in range(50)]
    # As text, since no NaN is another.
    assert [repr(draw_request(served, 3, number)) for number in range(49, -1, -1)] == [
        repr(request) for request in reversed(first)
    ]


def test_minimise() -> None:
    """What does not matter is left out, and what is too long is cut."""
    body = {"prompt": "x" * 500, "ids": [[1, 2, 3, 9], 4, 5], "x": {"a": 1, "b": 2}, "n": 3}

    def fails(candidate: dict[str, Any]) -> bool:
        return candidate.get("x", {}).get("b") == 2 and "9]" in str(candidate.get("ids"))

    assert minimise(body, fails) == {"ids": [[9]], "x": {"b": 2}}
