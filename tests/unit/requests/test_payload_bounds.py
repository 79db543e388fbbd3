"""Schemas and texts that would end the API process, or a request with an empty error, are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_diffusion.requests.bounds import MOST_ITEMS, schema_problem, text_problems

pytestmark = pytest.mark.engine


def within(schema: Any, depth: int) -> Any:
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": {"anyOf": [schema]}}}
    return schema


@given(st.integers(0, 2 * MOST_ITEMS), st.integers(0, 10**30), st.integers(0, 200), st.booleans())
def test_items(least: int, most: int, depth: int, as_text: bool) -> None:
    """Refused if and only if the counts add up to more than are compiled, wherever they stand."""
    schema = within({"type": "array", "minItems": least, "maxItems": most}, depth)
    constraint = StructuredOutputsParams(json=json.dumps(schema) if as_text else schema)
    problem = schema_problem(constraint)
    assert (problem is not None) == (least + most > MOST_ITEMS)
    assert problem is None or "minItems" in problem


def test_tools_are_looked_at_too() -> None:
    """Their schemas come within a structural tag."""
    tag = {"format": {"content": {"json_schema": {"type": "array", "minItems": 10**9}}}}
    assert schema_problem(StructuredOutputsParams(structural_tag=json.dumps(tag))) is not None


@given(st.text())
def test_text(text: str) -> None:
    """Every text passes."""
    params = SamplingParams(stop=[text or "x"], extra_args={text: [text]})
    assert not list(text_problems(params))


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("stop", {"stop": ["\ud800"]}),
        ("bad_words", {"bad_words": ["a\udfff"]}),
        ("vllm_xargs", {"extra_args": {"\ud800": 1}}),
        ("vllm_xargs", {"extra_args": {"a": ["\ud800"]}}),
    ],
)
def test_half_of_a_pair(field: str, options: dict[str, Any]) -> None:
    """What JSON can spell and UTF-8 cannot is named."""
    ((named, _),) = text_problems(SamplingParams(**options))
    assert named == field
