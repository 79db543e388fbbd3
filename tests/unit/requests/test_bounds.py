"""Every accepted value of a request fits the tensor, message or engine that receives it."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from tests.support.engines.admission import refused
from vllm_diffusion.requests.bounds import (
    MOST_OF_A_WORD,
    MOST_OF_WORDS,
    SAMPLING_PARAMS,
    problems,
    sampling_problems,
    text_problems,
)
from vllm_diffusion.requests.http import check_fields

pytestmark = pytest.mark.engine

INTEGERS = ("top_k", "max_tokens", "stream_interval", "min_tokens")
FLOATS = tuple(field for field in SAMPLING_PARAMS if field not in INTEGERS)
# Around every edge, and far beyond.
EDGES = [
    sign * 2**bits + near for sign in (1, -1) for bits in (30, 31, 63, 64) for near in (-1, 0, 1)
]
integers = st.one_of(st.sampled_from(EDGES), st.integers(), st.integers(-5, 5))
floats = st.one_of(st.floats(), st.floats(-2, 2), st.sampled_from([1e-46, 1e39, -1e39]))


def a_request(**fields: Any) -> SimpleNamespace:
    """Return what a request's ``SamplingParams`` hold, without vLLM's checks."""
    plain: dict[str, Any] = dict.fromkeys(INTEGERS, 1) | dict.fromkeys(FLOATS, 1.0)
    others = {"seed": None, "n": 1, "logit_bias": None, "repetition_detection": None}
    return SimpleNamespace(**(plain | others | fields))


def problem_fields(**fields: Any) -> list[str]:
    return [field for field, _, _ in sampling_problems(a_request(**fields))]


@given(st.sampled_from(INTEGERS), integers)
def test_integers_that_pass_fit(field: str, value: int) -> None:
    """Accepted integers fit the message to the engine, and the worker's int32 tensors."""
    if problem_fields(**{field: value}):
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value)) == value
    if field == "min_tokens":
        longest_prompt = np.int64(2**30)
        assert longest_prompt + value <= np.iinfo(np.int32).max


@given(integers, st.integers(1, 16384))
def test_seeds_that_pass_fit(seed: int, n: int) -> None:
    """The seeds of all answers, which vLLM counts up from the request's, fit."""
    if problem_fields(seed=seed, n=n):
        return
    for own in (seed, seed + n - 1):
        np.zeros(1, dtype=np.int64)[0] = own


@given(st.sampled_from([*FLOATS, "logit_bias"]), floats)
def test_floats_that_pass_stay_finite(field: str, value: float) -> None:
    """Accepted floats and biases keep logits, also capped ones, finite in float32."""
    if problem_fields(**{field: {5: value} if field == "logit_bias" else value}):
        return
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        held = np.float32(value)
        assert np.isfinite(held) or field != "logit_bias"
        if field == "repetition_penalty":
            for logit in np.array([30, -30, 1e4, -1e4], dtype=np.float32):
                assert np.isfinite(logit / held)
                assert np.isfinite(logit * held)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("top_k", {"top_k": 10**30}),
        ("stream_interval", {"stream_interval": 2**64}),
        ("max_tokens", {"max_tokens": 2**63}),
        ("min_tokens", {"min_tokens": 2**31}),
        ("seed", {"seed": 2**63}),
        ("seed", {"seed": 2**63 - 1, "n": 2}),
        ("logit_bias", {"logit_bias": {5: 1e39}}),
        ("logit_bias", {"logit_bias": {5: float("nan")}}),
        *(
            (field, {field: value})
            for field in FLOATS
            for value in (float("nan"), float("inf"), float("-inf"), 1e39)
        ),
        ("repetition_penalty", {"repetition_penalty": 1e-45}),
    ],
    ids=str,
)
def test_problem(field: str, fields: dict[str, Any]) -> None:
    """Every refused value is reported with its field, the allowed range and the value."""
    ((name, reason, value),) = sampling_problems(a_request(**fields))
    assert name == field
    assert "must be between" in reason
    assert "got " in reason
    assert reason.endswith(".")
    assert value is not None


def test_repetition_detection() -> None:
    """The integers of repetition detection, in the same message, are bounded too."""
    detection = SimpleNamespace(max_pattern_size=4, min_pattern_size=1, min_count=2)
    assert not problem_fields(repetition_detection=detection)
    for name in vars(detection):
        beyond = SimpleNamespace(**(vars(detection) | {name: 10**30}))
        ((field, reason, _),) = sampling_problems(a_request(repetition_detection=beyond))
        assert field == "repetition_detection"
        assert reason.startswith(f"{name} must be between")


@pytest.mark.parametrize("value", [0.01, 0.5, 1.1, 2.0, 100.0])
def test_penalties_in_use_pass(value: float) -> None:
    """Penalties that people use are accepted, since bounds refuse only what overflows."""
    assert not problem_fields(repetition_penalty=value, seed=2**63 - 1, top_k=2**40)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_long_words(field: str) -> None:
    """A stop string or bad word that is too long for a tokenizer is refused by its field."""
    words = ["a" * MOST_OF_A_WORD, "b" * (MOST_OF_A_WORD + 1)]
    ((named, reason, _),) = problems(SamplingParams(**{field: words}))
    assert named == field
    assert str(MOST_OF_A_WORD) in reason
    assert not list(problems(SamplingParams(**{field: words[:1]})))
    words = [letter * MOST_OF_A_WORD for letter in "abcd"]
    ((named, reason, _),) = problems(SamplingParams(**{field: words}))
    assert (named, str(MOST_OF_WORDS) in reason) == (field, True)


@given(st.text())
def test_text(text: str) -> None:
    """Every text is accepted."""
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
    """A lone surrogate, which JSON can spell and UTF-8 cannot, is refused by its field."""
    ((named, *_),) = text_problems(SamplingParams(**options))
    assert named == field


# As text.
DEEP = '{"a":' * 3000 + "1" + "}" * 3000


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"chat_template_kwargs": {"a": 2**70}}, "chat_template_kwargs", "64 bits"),
        ({"chat_template_kwargs": {"a": [-(2**70)]}}, "chat_template_kwargs", "64 bits"),
        ({"chat_template_kwargs": _nested(3000)}, "chat_template_kwargs", "nested"),
        ({"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs", "surrogate"),
        ({"request_id": "\ud800"}, "request_id", "surrogate"),
        ({"unknown": [2**64]}, "unknown", "64 bits"),
        (
            {"response_format": {"json_schema": {"schema": {"a": 2**70}}}},
            "response_format",
            "64 bits",
        ),
        ({"messages": [{"tool_calls": [{"function": {"arguments": DEEP}}]}]}, "messages", "nested"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_that_cannot_be_sent(fields, name, words):
    """Values that cannot be sent to the engine are refused by their field, wherever they are."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    request = ChatCompletionRequest.model_construct(**body)
    with refused(name, words):
        check_fields(request)


def test_fields_that_can_be_sent():
    """A body with emoji, 64-bit integers and nested objects is accepted."""
    check_fields(
        ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "\U0001f600"}],
            seed=2**63 - 1,
            chat_template_kwargs=_nested(50) | {"b": 2**64 - 1, "c": None, "d": 1e308},
        )
    )
