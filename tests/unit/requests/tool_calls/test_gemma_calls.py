"""A call drawn from the grammar of a tool is read by vLLM as arguments that satisfy its schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.exceptions import VLLMValidationError

from tests.support.checkpoints import SHIPPED
from tests.support.tool_schemas import PARAMETERS, gemma_parser, tool, tool_request
from vllm_diffusion import plugin

pytestmark = pytest.mark.engine

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
VOCAB_SIZE = 320
END = 1
# An end, the markers that end a call and a string, and the brackets "]" and "}".
CLOSING = (END, 13, 16, 84, 116)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    plugin.register()
    return AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCAB_SIZE)
    return xgrammar.GrammarCompiler(info)


def draw(compiler: xgrammar.GrammarCompiler, tag: str, seed: int) -> list[int]:
    """Tokens drawn at random from what the grammar allows, markers and ends more often."""
    matcher = xgrammar.GrammarMatcher(
        compiler.compile_structural_tag(tag), override_stop_tokens=[END]
    )
    bitmask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
    dice = random.Random(seed)
    tokens: list[int] = []
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(bitmask)
        bits = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:VOCAB_SIZE]).tolist()
        likely = [token for token in allowed if token in CLOSING]
        chosen = dice.choice(likely if likely and dice.random() < 0.5 else allowed)
        assert matcher.accept_token(chosen)
        tokens.append(chosen)
        assert len(tokens) < 5000
    return tokens[:-1]


def read_whole(tokenizer: Any, request: Any, tokens: list[int]) -> list[tuple[str, str]]:
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    _, content, calls = gemma_parser(tokenizer).parse(text, request, enable_auto_tools=True)
    assert not content
    return [(call.name, call.arguments) for call in calls]


def read_stream(
    tokenizer: Any, request: Any, tokens: list[int], width: int
) -> list[tuple[str, str]]:
    """What a client puts together from chunks of ``width`` tokens."""
    parser = gemma_parser(tokenizer)
    calls: dict[int, list[str]] = {}
    sent = ""
    for i in range(0, len(tokens), width):
        text = tokenizer.decode(tokens[: i + width], skip_special_tokens=False)
        finished = i + width >= len(tokens)
        if text.endswith("�") and not finished:
            # The server waits for the rest of a character.
            text = text.rstrip("�")
        delta = parser.parse_delta(
            text[len(sent) :], tokens[i : i + width], request, [2, 7, 8], finished=finished
        )
        sent = text
        for call in (delta.tool_calls if delta else None) or []:
            name_and_arguments = calls.setdefault(call.index, ["", ""])
            name_and_arguments[0] += call.function.name or ""
            name_and_arguments[1] += call.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()]


def check_call(tokenizer: Any, compiler: Any, parameters: Any, seed: int, width: int) -> None:
    request = tool_request([tool(parameters, strict=True), tool(None, name="stop-now")])
    adjusted = gemma_parser(tokenizer).adjust_request(request)
    tokens = draw(compiler, adjusted.structured_outputs.structural_tag, seed)
    calls = read_whole(tokenizer, adjusted, tokens)
    assert calls
    for name, arguments in calls:
        assert name in ("store", "stop-now")
        jsonschema.validate(json.loads(arguments), parameters if name == "store" else {})
    if "�" not in tokenizer.decode(tokens):
        assert read_stream(tokenizer, adjusted, tokens, width) == calls


@settings(max_examples=30, **QUIET)
@given(PARAMETERS, st.integers(0, 10**6), st.sampled_from([1, 7, 32]))
def test_calls_satisfy_their_schema(tokenizer, compiler, parameters, seed, width):
    """Any schema, any draw, whole or streamed."""
    check_call(tokenizer, compiler, parameters, seed, width)


def test_what_clients_generate_from_classes(tokenizer, compiler):
    """References, optional records and lists of records, as the openai client writes them."""
    from openai import pydantic_function_tool
    from pydantic import BaseModel

    class Place(BaseModel):
        city: str
        lines: list[int]

    class Store(BaseModel):
        """Store it."""

        home: Place | None
        others: list[Place]
        note: str | None
        ratio: float | int

    made = pydantic_function_tool(Store)
    parameters = made["function"]["parameters"]
    for seed in range(5):
        request = tool_request([dict(made)])
        adjusted = gemma_parser(tokenizer).adjust_request(request)
        tokens = draw(compiler, adjusted.structured_outputs.structural_tag, seed)
        for name, arguments in read_whole(tokenizer, adjusted, tokens):
            assert name == "Store"
            jsonschema.validate(json.loads(arguments), parameters)


def test_a_named_tool_is_called_once(tokenizer, compiler):
    """``required`` may call several times, a named tool and no parallel calls once."""
    tools = [tool({"type": "object", "properties": {}}, name=name) for name in ("one", "two")]
    for fields, names in (
        ({"tool_choice": {"type": "function", "function": {"name": "two"}}}, {"two"}),
        ({"parallel_tool_calls": False}, {"one", "two"}),
    ):
        adjusted = gemma_parser(tokenizer).adjust_request(tool_request(tools, **fields))
        for seed in range(4):
            tokens = draw(compiler, adjusted.structured_outputs.structural_tag, seed)
            (call,) = read_whole(tokenizer, adjusted, tokens)
            assert call[0] in names
            assert json.loads(call[1]) == {}


def test_auto_is_free_unless_a_tool_is_strict(tokenizer, compiler):
    """As with vLLM's other parsers."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    free = tool_request([tool(parameters)], tool_choice="auto")
    assert gemma_parser(tokenizer).adjust_request(free).structured_outputs is None
    strict = tool_request([tool(parameters, strict=True)], tool_choice="auto")
    adjusted = gemma_parser(tokenizer).adjust_request(strict)
    matcher = xgrammar.GrammarMatcher(
        compiler.compile_structural_tag(adjusted.structured_outputs.structural_tag)
    )
    for text in ("yes, ", "<|tool_call>call:store{a:1}<tool_call|>"):
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert matcher.accept_token(token)
    assert matcher.accept_token(tokenizer.convert_tokens_to_ids("<|tool_call>"))
    assert not matcher.accept_token(tokenizer.encode("x", add_special_tokens=False)[0])


def test_other_models_are_left_alone(tokenizer):
    """For a model that does not diffuse, ``gemma4`` asks for what vLLM's parser asks for."""
    from vllm.tool_parsers.gemma4_engine_tool_parser import Gemma4EngineToolParser

    for choice in ("required", "auto", {"type": "function", "function": {"name": "store"}}):
        tools = [tool({"type": "object", "properties": {"a": {"not": {}}}}, strict=True)]
        request = tool_request(tools, tool_choice=choice)
        ours = gemma_parser(tokenizer, is_diffusion=False)
        assert ours.tool_parser.structural_tag_model is Gemma4EngineToolParser.structural_tag_model
        assert ours.adjust_request(request.model_copy()) == Gemma4EngineToolParser(
            tokenizer, request.tools
        ).adjust_request(request.model_copy())


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be enforced"),
        ({"type": "string", "pattern": "(?=a)b"}, "a.pattern"),
        ({"type": "string", "pattern": "^a$|b"}, "a.pattern"),
        ({"type": "string", "pattern": "^<$"}, "a.pattern"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "with a length"),
        ({"type": "number", "multipleOf": 1.7}, "multipleOf"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "allows no number"),
        ({"anyOf": [TEXT, {"type": "integer", "minimum": 3}]}, "string or integer"),
        ({"type": "text"}, "/type: must be of"),
        ({"anyOf": [TEXT, {"type": "array"}]}, "string or array"),
        ({"anyOf": [TEXT, {"enum": [1, 2]}]}, "string or integer"),
        ({"anyOf": [{"type": "object"}, {"type": "object"}]}, "two alternatives of type object"),
        ({"allOf": [TEXT, TEXT]}, "allOf is not supported"),
        ({"anyOf": [TEXT], "maxLength": 3}, "anyOf together with maxLength"),
        ({"enum": [[1]]}, "array or an object"),
        ({"enum": []}, "allows no value"),
        ({"type": "string", "enum": [1]}, "allows no value"),
        ({"enum": ["<|tool_call>"]}, "special token"),
        ({"$ref": "#/$defs/none"}, "names nothing"),
        ({"$ref": "#/properties/a"}, "refers to itself"),
        ({"type": "array", "prefixItems": [TEXT]}, "prefixItems"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "below minItems"),
        ({"type": "string", "maxLength": -1}, "/maxLength: -1 is less than"),
        ({"type": "object", "properties": {"a:b": TEXT}}, "'a:b'"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "additionalProperties"),
        ("text", "#/properties/a: 'text' is not of type"),
        (False, "allows no value"),
    ],
    ids=repr,
)
def test_refused_schemas(tokenizer, schema, words):
    """What the format cannot say is refused by tool, place and reason, before anything runs."""
    parameters = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(VLLMValidationError, match=r"tools: store: ") as refusal:
        gemma_parser(tokenizer).adjust_request(tool_request([tool(parameters, strict=True)]))
    assert words in str(refusal.value)
    assert refusal.value.parameter == "tools"


@pytest.mark.parametrize("keyword", [{"pattern": "a+"}, {"minimum": 3}, {"format": "date"}])
def test_a_tool_that_is_not_strict_may_narrow_its_values(tokenizer, keyword):
    """Its types are held to, the rest is the model's affair."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", **keyword}}}
    adjusted = gemma_parser(tokenizer).adjust_request(tool_request([tool(parameters)]))
    assert adjusted.structured_outputs.structural_tag


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"type": "object", "properties": {"a": {"oneOf": [TEXT, {"type": "object"}]}}},
    ],
    ids=repr,
)
def test_a_tool_that_is_not_strict_takes_any_object(tokenizer, parameters):
    """Where its schema cannot be followed it is called all the same."""
    adjusted = gemma_parser(tokenizer).adjust_request(tool_request([tool(parameters)]))
    assert adjusted.structured_outputs.structural_tag


@pytest.mark.parametrize(
    "alternative",
    [
        False,
        {"enum": []},
        {"type": "string", "enum": [1]},
        {"type": "string", "nullable": True, "enum": [None]},
    ],
    ids=repr,
)
def test_an_alternative_that_allows_nothing_leaves_the_others(tokenizer, alternative):
    """A strict tool's alternative without a value is left out, as zod and OpenAPI write null."""
    parameters = {"type": "object", "properties": {"a": {"anyOf": [TEXT, alternative]}}}
    adjusted = gemma_parser(tokenizer).adjust_request(tool_request([tool(parameters, strict=True)]))
    assert adjusted.structured_outputs.structural_tag


def test_all_refused_tools_are_named(tokenizer):
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [tool(parameters, name, strict=True) for name in ("one", "two")]
    with pytest.raises(
        VLLMValidationError, match=r"one: parameters\.a\.not.*two: parameters\.a\.not"
    ):
        gemma_parser(tokenizer).adjust_request(tool_request([tool({}, "fine"), *tools]))


def test_a_schema_cannot_multiply(tokenizer):
    """References that double at each level are refused in no time, as is a deep schema."""
    definitions = {"d0": TEXT} | {
        f"d{i}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{i - 1}"} for name in ("a", "b")},
        }
        for i in range(1, 31)
    }
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"type": "object", "properties": {"a": deep}}
    for parameters in ({"$ref": "#/$defs/d30", "$defs": definitions}, deep):
        with pytest.raises(VLLMValidationError, match="too large|too deep"):
            gemma_parser(tokenizer).adjust_request(tool_request([tool(parameters, strict=True)]))
