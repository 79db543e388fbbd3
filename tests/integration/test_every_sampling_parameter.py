"""Tests of every sampling parameter in every way of decoding, on this machine's platform.

With each that a way has the engine answers and lives on.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.engines.engine import TracedEngine
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.checkpoints import CHECKPOINTS

pytestmark = pytest.mark.engine

NUM_TOKENS = 10
PROMPT = list(range(30, 60))
# Parameters above temperature 0, unless they say otherwise; each has a seed.
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.9},
    "top_p of nearly nothing": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "min_p of one": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 5, "top_p": 0.9},
    "all filters": {"top_k": 20, "top_p": 0.95, "min_p": 0.05},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {77: 100.0}},
    "min_tokens": {"min_tokens": 5, "logit_bias": {1: 100.0}, "ignore_eos": False},
    "bad_words": {"bad_words": ["a"]},
    "allowed_token_ids": {"allowed_token_ids": [40, 41, 99]},
    "logprobs": {"logprobs": 3, "top_p": 0.9},
    "logprobs of all": {"logprobs": -1},
    "logprob_token_ids": {"logprob_token_ids": [40, 41]},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "prompt_logprobs of all": {"prompt_logprobs": -1},
    # Without the token that this prompt makes all but certain.
    "n": {"n": 3, "temperature": 1.7, "logit_bias": {1: -100.0}},
    "the same again": {"temperature": 1.7},
}
# Each leaves the likeliest token alone.
GREEDY = ("top_k of one", "top_p of nearly nothing", "min_p of one")
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}


class Way(NamedTuple):
    """A way of decoding.

    Attributes:
        checkpoint: What is served.
        settings: Of the diffusion models alone.
        refused: Parameters that this way does not have.
        draws_tokens: Whether each token is drawn from the model's own distribution.
    """

    checkpoint: Path
    settings: dict[str, Any]
    refused: frozenset[str] = frozenset()
    draws_tokens: bool = True


WAYS = {
    "causal": Way(CHECKPOINTS / "tiny_qwen3", {}),
    "autoregressive": Way(SHIPPED, {"rule": "autoregressive"}),
    "linear_spec": Way(SHIPPED, {"rule": "linear_spec"}, frozenset({*PENALTIES, "bad_words"})),
    "diffusion": Way(SHIPPED, {}, draws_tokens=False),
}


class Served(NamedTuple):
    """An engine, and how it decodes."""

    engine: TracedEngine
    way: Way

    def ask(self, *names: str) -> dict[str, Any]:
        """Return the finished request of each of these parameters, which run in one batch."""
        wanted = [
            self.engine.sampling_params(
                **({"seed": 5, "temperature": 1.0, "ignore_eos": True} | PARAMETERS[name]),
                max_tokens=NUM_TOKENS,
            )
            for name in names
        ]
        outputs = self.engine.outputs([PROMPT] * len(names), wanted)
        return dict(zip(names, outputs, strict=True))


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    way: Way = request.param
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 32, "max_logprobs": -1}
    if way.settings:
        options["additional_config"] = {"diffusion": way.settings}
    with TracedEngine(way.checkpoint, **options) as engine:
        yield Served(engine, way)


def tokens_of(output: Any) -> list[list[int]]:
    return [list(answer.token_ids) for answer in output.outputs]


def test_in_one_batch(served: Served) -> None:
    """All parameters act as documented in one batch, and a filter to one token is greedy."""
    names = [name for name in PARAMETERS if name not in served.way.refused]
    outputs = served.ask(*names)
    found = {name: tokens_of(output) for name, output in outputs.items()}
    (greedy,) = found["greedy"]
    if served.way.draws_tokens:
        for name in GREEDY:
            assert found[name] == [greedy], name
    for name, answers in found.items():
        assert len(answers) == PARAMETERS[name].get("n", 1), name
        lengths = {6} if name == "min_tokens" else {NUM_TOKENS}
        assert {len(answer) for answer in answers} == lengths, name
    assert found["logit_bias"] == [[77] * NUM_TOKENS]
    assert set(found["allowed_token_ids"][0]) <= {40, 41, 99}
    assert 1 not in found["min_tokens"][0][:5]
    assert found["temperature"] == found["the same again"]
    assert len({*map(tuple, found["n"])}) == 3
    if "bad_words" in outputs:
        assert "a" not in outputs["bad_words"].outputs[0].text

    vocab_size = served.engine.llm.model_config.get_vocab_size()
    widths = (("logprobs", 3), ("logprobs of all", vocab_size), ("logprob_token_ids", 2))
    for name, width in widths:
        rows = outputs[name].outputs[0].logprobs
        assert len(rows) == NUM_TOKENS
        # The token itself may be one of the listed ones.
        assert all(len(row) in (width, width + 1) for row in rows), name
    for name, width in (("prompt_logprobs", 3), ("prompt_logprobs of all", vocab_size)):
        first, *rows = outputs[name].prompt_logprobs
        assert first is None
        assert len(rows) == len(PROMPT) - 1
        assert all(len(row) in (width, width + 1) for row in rows), name
    few, every = (
        outputs[name].prompt_logprobs[1:] for name in ("prompt_logprobs", "prompt_logprobs of all")
    )
    for some, all_of_them in zip(few, every, strict=True):
        for token, one in some.items():
            assert one.logprob == pytest.approx(all_of_them[token].logprob, abs=1e-5)


CONSTRAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "EBNF": ({"grammar": 'root ::= "<" ("a" | "b"){3} ">"'}, "<[ab]{3}>"),
    "a schema": (
        {"json": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}},
        '"[a-z]{1,3}"',
    ),
    "an expression": ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
    "choices": ({"choice": ["blue", "dark red"]}, "blue|dark red"),
    "Lark": ({"grammar": 'start: "x" ("y"|"z")~3'}, "x[yz]{3}"),
}


CONSTRAINED = ("autoregressive", "diffusion")


@pytest.mark.parametrize(
    "served", [WAYS[way] for way in CONSTRAINED], ids=CONSTRAINED, indirect=True
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_of_each_back_end(served: Served, temperature: float) -> None:
    """Each request has the back end of its constraint, whichever was first in the batch."""
    from vllm.sampling_params import StructuredOutputsParams

    for names in (["a schema"], ["EBNF"], [*CONSTRAINTS]):
        wanted = [
            served.engine.sampling_params(
                seed=5,
                temperature=temperature,
                max_tokens=40,
                skip_special_tokens=True,
                structured_outputs=StructuredOutputsParams(**CONSTRAINTS[name][0]),
            )
            for name in names
        ]
        outputs = served.engine.outputs([PROMPT] * len(names), wanted)
        for name, output in zip(names, outputs, strict=True):
            (answer,) = output.outputs
            assert answer.finish_reason == "stop", name
            assert re.fullmatch(CONSTRAINTS[name][1], answer.text), (name, answer.text)
