"""Failures that campaigns and people found, as small requests that must end alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.campaign import send_alone
from tests.robustness.requests import COMPLETIONS, Request
from tests.support.engines.server import MODEL, Server

pytestmark = pytest.mark.engine

# ``body`` is what differs from a small request; ``path`` is of completions where it is left out.
CASES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("kept_cases.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_kept_case(case: dict[str, Any], server: Server) -> None:
    """A kept case gets its recorded answer or refusal, and leaves the server idle."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 8, **case["body"]}
    outcome = send_alone(server, Request("hostile", case.get("path", COMPLETIONS), body))
    server.wait_until_idle()
    server.assert_alive()
    assert outcome.sort in case["ends_in"], outcome
