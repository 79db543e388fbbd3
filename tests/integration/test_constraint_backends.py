"""Every back end of vLLM for structured outputs holds a canvas to its constraint."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.test_structured_outputs import ask
from tests.support.checkpoints import random_checkpoint
from tests.support.engine import TracedEngine

pytestmark = pytest.mark.engine

RECORD = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(
    scope="module",
    params=[
        "outlines",
        pytest.param("guidance", marks=pytest.mark.slow),
    ],
)
def engine(request, tmp_path_factory):
    checkpoint = random_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    engine = TracedEngine(checkpoint, structured_outputs_config={"backend": request.param})
    yield engine
    engine.close()


def test_back_end(engine):
    """An expression longer than a canvas, a short one, a choice and a schema, in one batch."""
    expressions = ("([a-z]{5} ){6}[0-9]{3}", "[0-9]{3}-[a-f]{4}")
    long, short, choice, record = ask(
        engine,
        [
            *({"regex": expression} for expression in expressions),
            {"choice": ["blue", "dark red"]},
            {"json": RECORD},
        ],
        max_tokens=64,
    )
    for expression, answer in zip(expressions, (long, short), strict=True):
        assert answer.finish_reason == "stop"
        assert re.fullmatch(expression, answer.text), answer.text
    assert (choice.text, choice.finish_reason) in (("blue", "stop"), ("dark red", "stop"))
    if record.finish_reason == "stop":
        assert json.loads(record.text)["name"] in ("ada", "bob")
