"""A short campaign on the shared server; a long one is a command (``campaign.py``)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.robustness.campaign import Tally, describe, minimise, run_round
from tests.robustness.client import Outcome, send
from tests.robustness.requests import Request, draw_request
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
    assert minimise(body, lambda candidate: candidate.get("prompt", "")[:3] == "xxx") == {
        "prompt": "xxx"
    }
    # What no part of it does.
    assert minimise(5, lambda candidate: False) == 5


@pytest.mark.parametrize(
    ("body", "text", "is_own"),
    [
        ({"structured_outputs": "x"}, "'str' object has no attribute 'get'", False),
        ({"stop": ["\ud800"]}, '{"error":{"message":"","code":500}}', True),
        ({"stop": ["a"]}, '{"error":{"message":"","code":500}}', False),
        ({"stop": ["\ud800"]}, '{"error":{"message":"overflow","code":500}}', False),
        ({"kv_transfer_params": {"a": 1}}, "anything", True),
        ({"kv_transfer_params": None}, "anything", False),
    ],
)
def test_vllms_own(body: dict[str, Any], text: str, is_own: bool) -> None:
    """An error is vLLM's own only for the request and the message that are known."""
    request = Request("hostile", "/v1/completions", body)
    assert (Outcome(500, text, 0.1, "answer").vllms_own(request) is not None) == is_own
    assert Outcome(400, text, 0.1, "answer").vllms_own(request) is None
    assert Outcome(None, text, 0.1, "broken").vllms_own(request) is None


@pytest.mark.parametrize(
    ("code", "sort"), [(400, "refused"), (500, "failed"), (None, "answered")], ids=str
)
def test_error_in_a_stream(code: int | None, sort: str) -> None:
    """A stream that begins with 200 counts as what it ends with."""
    lines = ['data: {"choices": [{"index": 0, "text": "an error"}]}', "data: [DONE]"]
    if code is not None:
        lines.insert(1, json.dumps({"error": {"message": "no", "code": code}}).join(["data: ", ""]))
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="\n\n".join(lines)))
    with httpx.Client(base_url="http://server", transport=transport) as client:
        assert send(client, Request("valid", "/v1/completions", {}), 5.0).sort == sort
