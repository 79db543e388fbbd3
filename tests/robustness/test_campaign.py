"""Runs a short campaign on the shared server; a long one is a command (``campaign.py``)."""

import pytest

from tests.robustness.campaign import Tally, describe, run_round
from tests.support.engines.server import Server

# Of its clients four leave early.
SEED = 23
NUM_REQUESTS = 75


@pytest.mark.engine
def test_short_campaign(server: Server) -> None:
    """After requests of every kind, answered, refused or left, the server is as before."""
    tally = Tally()
    served = describe(server, images=False)
    print(f"\nseed {SEED}")
    run_round(server, served, SEED, range(NUM_REQUESTS), tally, compared=8)
    print(tally.table())
    assert not tally.failures, "\n".join(tally.failures)
    # A campaign with few requests of each kind proves little.
    sent = tally.counts.total()
    assert sent == NUM_REQUESTS
    for sort in ("answered", "refused", "aborted"):
        assert sum(tally.counts[kind, sort] for kind in ("valid", "edge", "hostile")) > sent // 50
    assert tally.num_compared == 8
