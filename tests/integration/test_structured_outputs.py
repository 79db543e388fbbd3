"""Constrained answers satisfy their schema, expression or grammar, whatever the model prefers.

An answer that ends with ``stop`` satisfies the constraint; one that ends with ``length`` is a
prefix of an answer that does. The weights are random (they know no JSON at all) and the shipped
ones.
"""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.engine import TracedEngine
from vllm_diffusion.metrics import request_metrics

pytestmark = pytest.mark.engine

CANVAS = 32
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def engine(weights):
    with TracedEngine(weights, max_num_seqs=8) as engine:
        yield engine


def ask(engine, constraints: list[dict[str, Any]], max_tokens: int = 4 * CANVAS, **params: Any):
    """Return one answer per constraint, all in one batch, in few steps per canvas."""
    sampling = [
        engine.sampling_params(
            seed=i,
            max_tokens=max_tokens,
            structured_outputs=StructuredOutputsParams(**constraint),
            skip_special_tokens=True,
            extra_args={"diffusion_max_steps": 3},
            **params,
        )
        for i, constraint in enumerate(constraints)
    ]
    messages = [[{"role": "user", "content": "Make a JSON record: name ada, age 7."}]]
    outputs = engine.llm.chat(messages * len(constraints), sampling, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def matcher(engine, constraint: dict[str, Any]):
    """Return a matcher of xgrammar for the constraint, independent of the engine's."""
    import xgrammar

    tokenizer = engine.llm.get_tokenizer()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=320)
    compiler = xgrammar.GrammarCompiler(info)
    if "json" in constraint:
        # As vLLM compiles a schema: white space as the model likes it.
        compiled = compiler.compile_json_schema(json.dumps(constraint["json"]), any_whitespace=True)
    else:
        compiled = compiler.compile_regex(constraint["regex"])
    return xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)


def assert_valid(engine, constraint: dict[str, Any], answer: Any) -> None:
    assert answer.finish_reason in ("stop", "length")
    if answer.finish_reason == "length":
        machine = matcher(engine, constraint)
        assert machine.accept_string(answer.text.encode("utf-8", "surrogateescape")) or (
            # A character may be cut in the middle of its bytes.
            "\N{REPLACEMENT CHARACTER}" in answer.text
        )
    elif "json" in constraint:
        # xgrammar lets control characters into strings of bounded length.
        jsonschema.validate(json.loads(answer.text, strict=False), constraint["json"])
    else:
        assert re.fullmatch(constraint["regex"], answer.text), answer.text


def test_allowed_ids_and_a_constraint(engine):
    """The constraint has priority only where it leaves none of the allowed ids."""
    (allowed,) = engine.llm.get_tokenizer().encode("a", add_special_tokens=False)
    for expression, text in (("b{3}", "bbb"), ("(a|b){3}", "aaa")):
        (answer,) = ask(engine, [{"regex": expression}], allowed_token_ids=[allowed])
        assert (answer.text, answer.finish_reason) == (text, "stop")


def test_longer_than_a_canvas(engine):
    """The grammar continues across canvases, and ``max_tokens`` may cut it anywhere."""
    expression = "([a-z]{5} ){12}[0-9]{7}"
    (answer,) = ask(engine, [{"regex": expression}])
    assert answer.finish_reason == "stop"
    assert re.fullmatch(expression, answer.text)
    for max_tokens in (3, CANVAS, CANVAS + 5):
        (cut,) = ask(engine, [{"regex": expression}], max_tokens=max_tokens)
        assert cut.finish_reason == "length"
        assert len(cut.token_ids) == max_tokens
        assert_valid(engine, {"regex": expression}, cut)


@pytest.mark.parametrize("weights", ["trained"], indirect=True)
def test_a_constraint_costs_a_fitting_answer_nothing(engine):
    """A schema that the trained weights satisfy anyway takes no additional steps."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    results = []
    for constraint in (None, StructuredOutputsParams(json=schema)):
        (output,) = engine.llm.chat(
            [{"role": "user", "content": "Make a JSON record: name ada, age 7."}],
            engine.sampling_params(
                seed=1, max_tokens=64, structured_outputs=constraint, skip_special_tokens=True
            ),
            use_tqdm=False,
        )
        results.append(output.outputs[0])
    free, held = results
    assert json.loads(held.text) == json.loads(free.text) == {"name": "ada", "age": 7}
    steps = [request_metrics(result).denoise_steps_per_canvas for result in (free, held)]
    assert steps[0] == steps[1]


def test_bad_words_inside_a_schema(engine):
    """A schema and bad words hold at once."""
    (answer,) = ask(engine, [{"regex": "[ab]{12}"}], bad_words=["ab", "bb"])
    assert re.fullmatch("[ab]{12}", answer.text)
    assert "ab" not in answer.text
    assert "bb" not in answer.text


NAMES = st.text("abcdefgh_ü€", min_size=1, max_size=5)
LEAVES = st.one_of(
    st.fixed_dictionaries({"type": st.just("string")}, optional={"maxLength": st.integers(1, 6)}),
    st.just({"type": "integer"}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "number"}),
    st.lists(st.one_of(st.integers(-99, 99), NAMES), min_size=1, max_size=4, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(_object),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {
                "type": "array",
                "items": pair[0],
                "minItems": pair[1],
                "maxItems": pair[1] + 1,
            }
        ),
    ),
    max_leaves=4,
)
ATOMS = st.sampled_from(["a", "[0-9]", "[a-f]", "(yes|no)", r"\.", "ü", "[A-Z]", "€", " "])
REPEATS = st.sampled_from(["", "?", "{2}", "{1,3}", "{5}"])
EXPRESSIONS = st.lists(
    st.one_of(
        st.tuples(ATOMS, REPEATS).map("".join),
        st.tuples(ATOMS, ATOMS).map(lambda pair: f"({pair[0]}|{pair[1]}x)"),
    ),
    min_size=1,
    max_size=6,
).map("".join)
JSON = SCHEMAS.map(lambda schema: {"json": schema})
# Two schemas for every expression.
CONSTRAINTS = st.one_of(JSON, JSON, EXPRESSIONS.map(lambda text: {"regex": text}))
BATCHES = st.lists(CONSTRAINTS, min_size=5, max_size=5)


@settings(max_examples=3, **QUIET)
@given(BATCHES, st.sampled_from([20, 96]))
def test_random_schemas_and_expressions(engine, constraints, max_tokens):
    """Answers satisfy random schemas and expressions."""
    for constraint, answer in zip(constraints, ask(engine, constraints, max_tokens), strict=True):
        assert_valid(engine, constraint, answer)
