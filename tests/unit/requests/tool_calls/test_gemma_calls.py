"""A call drawn from the grammar of a tool is read by vLLM as arguments that satisfy its schema."""

import asyncio
import functools
import json
import random
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from transformers import AutoTokenizer
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.admission import refused
from tests.support.engines.vllm_configs import vllm_config
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.tool_schemas import PARAMETERS, gemma_parser, tool, tool_request
from vllm_diffusion import plugin
from vllm_diffusion.live.streamed_parser import following_whole_answers
from vllm_diffusion.requests.constraint import read_constraint
from vllm_diffusion.requests.guidance import guidance_grammar
from vllm_diffusion.requests.tool_calls import schema_reader
from vllm_diffusion.requests.tool_calls.read_tools import read_tools_aside
from vllm_diffusion.scheduling.grammars import GuidedText, _ll_tokenizer

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
def compiler(tokenizer: Any) -> Any:
    """Return llguidance's tokenizer of the model, for which grammars are compiled."""
    return _ll_tokenizer(tokenizer, VOCAB_SIZE)


def machine(compiler: Any, request: Any) -> GuidedText:
    """Return the engine's grammar for the constraint of a request."""
    constraint = request.structured_outputs
    read_constraint(constraint, StructuredOutputsConfig())
    assert constraint._backend == "guidance"
    matcher = LLMatcher(compiler, guidance_grammar("grammar", constraint.grammar), log_level=0)
    assert not matcher.get_error()
    ends = frozenset([END])
    return GuidedText(matcher, ends, ends.union(compiler.eos_tokens))


def draw(compiler: Any, request: Any, seed: int) -> list[int]:
    """Draw tokens that the grammar allows, markers and ends more often."""
    grammar = machine(compiler, request)
    bitmask = torch.zeros((1, VOCAB_SIZE // 32), dtype=torch.int32)
    dice = random.Random(seed)
    tokens: list[int] = []
    while not grammar.is_terminated():
        grammar.fill_bitmask(bitmask, 0)
        bits = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:VOCAB_SIZE]).tolist()
        likely = [token for token in allowed if token in CLOSING]
        chosen = dice.choice(likely if likely and dice.random() < 0.5 else allowed)
        assert grammar.accept_tokens("", [chosen])
        tokens.append(chosen)
        assert len(tokens) < 5000
    return tokens[:-1]


def read_whole(tokenizer: Any, request: Any, tokens: list[int]) -> list[tuple[str, str]]:
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    _, content, calls = gemma_parser(tokenizer).parse(text, request, enable_auto_tools=True)
    assert not content
    return [(call.name, call.arguments) for call in calls]


def read_stream(
    parser: Any, tokenizer: Any, request: Any, tokens: list[int], width: int
) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls that a client puts together from chunks of ``width`` tokens."""
    calls: dict[int, list[str]] = {}
    sent = content = ""
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
        content += (delta.content if delta else None) or ""
        for call in (delta.tool_calls if delta else None) or []:
            name_and_arguments = calls.setdefault(call.index, ["", ""])
            name_and_arguments[0] += call.function.name or ""
            name_and_arguments[1] += call.function.arguments or ""
    return content, [(name, arguments) for name, arguments in calls.values()]


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, markers among them."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def adjusted(tokenizer: Any, *tools: Any, **fields: Any) -> Any:
    """Return a request with these tools, with the constraint that the parser gives it."""
    return gemma_parser(tokenizer).adjust_request(tool_request([*tools], **fields))


def check_call(tokenizer: Any, compiler: Any, parameters: Any, seed: int, width: int) -> None:
    request = adjusted(tokenizer, tool(parameters, strict=True), tool(None, name="stop-now"))
    tokens = draw(compiler, request, seed)
    calls = read_whole(tokenizer, request, tokens)
    assert calls
    for name, arguments in calls:
        assert name in ("store", "stop-now")
        jsonschema.validate(json.loads(arguments), parameters if name == "store" else {})
    if "�" not in tokenizer.decode(tokens):
        parser = gemma_parser(tokenizer)
        assert read_stream(parser, tokenizer, request, tokens, width) == ("", calls)


LIKE_A_TOKEN = "is spelled like a special token, which no argument may hold"


@settings(max_examples=30, **QUIET)
@given(PARAMETERS, st.integers(0, 10**6), st.sampled_from([1, 7, 32]))
def test_calls_satisfy_their_schema(tokenizer, compiler, parameters, seed, width):
    """Any draw for any schema, whole or streamed, gives arguments that satisfy the schema."""
    try:
        check_call(tokenizer, compiler, parameters, seed, width)
    except VLLMValidationError as error:
        # Unless the only value that a schema leaves to choose is a special token's text.
        if LIKE_A_TOKEN not in str(error) or '<|\\"|>' not in json.dumps(parameters):
            raise


def test_value_like_a_special_token(tokenizer, compiler):
    """A value that is spelled like a special token is never an argument, and refused if it is the
    only one.
    """
    only, other = ({"properties": {"a": {"enum": ['<|"|>', *more]}}} for more in ([], ["b"]))
    with pytest.raises(VLLMValidationError, match=LIKE_A_TOKEN):
        check_call(tokenizer, compiler, only, seed=0, width=1)
    for seed in range(5):
        check_call(tokenizer, compiler, other, seed, width=1)


def test_what_clients_generate_from_classes(tokenizer, compiler):
    """Schemas that the openai client writes from nested and optional records are followed."""
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
        request = adjusted(tokenizer, dict(made))
        for name, arguments in read_whole(tokenizer, request, draw(compiler, request, seed)):
            assert name == "Store"
            jsonschema.validate(json.loads(arguments), parameters)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('a:<|"|>7<|"|>,b:<|"|>7<|"|>,c:7', {"a": 7, "b": "7", "c": "7"}),
        ('a:<|"|>x<|"|>,d:<|"|>7<|"|>', {"a": "x", "d": "7"}),
        ("a:seven,c:1.50,d:on", {"a": "seven", "c": "1.50", "d": "on"}),
        ('c:"x",d:[1,<|"|>1<|"|>,{e:true}]', {"c": "x", "d": [1, "1", {"e": True}]}),
        ('e:{a:1,f:<|"|>1<|"|>},b:1', {"e": {"a": "1", "f": 1}, "b": 1}),
        ('<|"|>b<|"|>:2,d:1e999,g:null', {"b": 2, "d": "1e999", "g": None}),
        ("", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_free_calls_are_read_by_what_they_write(tokenizer, call, arguments):
    """A value of an allowed type keeps it, and another is converted to one if possible."""
    parameters = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["integer", "string"]},
            "c": {"$ref": "#/$defs/word"},
            "d": {},
            "e": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/word"}, "f": {"type": "number"}},
            },
        },
        "$defs": {"word": {"type": "string"}},
    }
    request = tool_request([tool(parameters)], tool_choice="auto")
    tokens = encoded(tokenizer, f"<|tool_call>call:store{{{call}}}<tool_call|>")
    (whole,) = read_whole(tokenizer, request, tokens)
    assert json.loads(whole[1]) == arguments
    for width in (1, 5, 64):
        _, (streamed,) = read_stream(gemma_parser(tokenizer), tokenizer, request, tokens, width)
        assert json.loads(streamed[1]) == arguments, width


def test_a_named_tool_is_called_once(tokenizer, compiler):
    """``required`` allows several calls; a named tool or no parallel calls allow one."""
    tools = [tool({"type": "object", "properties": {}}, name=name) for name in ("one", "two")]
    for fields, names in (
        ({"tool_choice": {"type": "function", "function": {"name": "two"}}}, {"two"}),
        ({"parallel_tool_calls": False}, {"one", "two"}),
    ):
        request = adjusted(tokenizer, *tools, **fields)
        for seed in range(4):
            (call,) = read_whole(tokenizer, request, draw(compiler, request, seed))
            assert call[0] in names
            assert json.loads(call[1]) == {}


def test_auto_is_free_unless_a_tool_is_strict(tokenizer, compiler):
    """``auto`` constrains nothing unless a tool is strict, as with vLLM's other parsers."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert adjusted(tokenizer, tool(parameters), tool_choice="auto").structured_outputs is None
    strict = adjusted(tokenizer, tool(parameters, strict=True), tool_choice="auto")
    grammar = machine(compiler, strict)
    for text in ("yes, ", "<|tool_call>call:store{a:1}<tool_call|>"):
        for token in encoded(tokenizer, text):
            assert grammar.accept_tokens("", [token])
    call = tokenizer.convert_tokens_to_ids("<|tool_call>")
    assert grammar.accept_tokens("", [call])
    assert not grammar.accept_tokens("", encoded(tokenizer, "x")[:1])


@pytest.mark.parametrize("follows", [False, True], ids=["stock's stream", "our stream"])
def test_a_call_that_may_not_be_made_is_text(tokenizer, follows):
    """With ``tool_choice`` none a client gets the text of a call, whole and streamed, and no
    call.
    """
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    request = tool_request([tool(parameters)], tool_choice="none")
    written = 'So:<|tool_call>call:store{city:<|"|>Paris<|"|>}<tool_call|>'
    tokens = encoded(tokenizer, written)
    _, content, calls = gemma_parser(tokenizer).parse(written, request, enable_auto_tools=True)
    assert (content, calls or []) == ('So:call:store{city:"Paris"}', [])
    for width in (1, 5, 64):
        parser = gemma_parser(tokenizer)
        if follows:
            following = following_whole_answers(type(parser))
            parser = following(tokenizer, None, model_config=vllm_config().model_config)
        assert read_stream(parser, tokenizer, request, tokens, width) == (content, []), width


def test_other_models_are_left_alone(tokenizer):
    """For a model that does not diffuse, ``gemma4`` constrains what vLLM's own parser does."""
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
NESTED = functools.reduce(lambda inner, _: [inner], range(40), [])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be enforced"),
        ({"$dynamicRef": "#node"}, "dynamicRef cannot be enforced"),
        ({"type": "string", "pattern": "(?=a)b"}, "a.pattern"),
        ({"type": "string", "pattern": "^a$|b"}, "a.pattern"),
        ({"type": "string", "pattern": "^<$"}, "a.pattern"),
        ({"type": "string", "pattern": "^a{4}$", "maxLength": 3}, "no text satisfies it"),
        ({"type": "string", "pattern": r"\ea"}, r"the escape \e"),
        ({"type": "string", "pattern": "[!--]"}, "two dashes"),
        ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}, "multipleOf"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "allows no number"),
        ({"type": "text"}, "/type: must be of"),
        ({"allOf": [TEXT, TEXT]}, "allOf is not supported"),
        ({"anyOf": [TEXT], "maxLength": 3}, "anyOf together with maxLength"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "two alternatives of type object"),
        ({"oneOf": [{"type": "number"}, {}]}, "a.oneOf has an alternative that allows anything"),
        ({"oneOf": [{"description": "x"}, TEXT]}, "a.oneOf has an alternative that allows"),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
                    {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["b"]},
                ]
            },
            "two alternatives of type object",
        ),
        ({"enum": [[{"b:": 1}]]}, "'b:'"),
        ({"const": NESTED}, "levels"),
        ({"enum": []}, "allows no value"),
        ({"type": "string", "enum": [1]}, "allows no value"),
        ({"enum": ["<|tool_call>"]}, "special token"),
        ({"$ref": "#/$defs/none"}, "names nothing"),
        ({"$ref": "#/properties/a"}, "refers to itself"),
        ({"type": "array", "prefixItems": [TEXT]}, "prefixItems"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "below minItems"),
        ({"type": "string", "maxLength": -1}, "/maxLength: -1 is less than"),
        ({"type": "object", "properties": {"a:b": TEXT}}, "'a:b'"),
        ("text", "#/properties/a: 'text' is not of type"),
        (False, "allows no value"),
    ],
    ids=repr,
)
def test_refused_schemas(tokenizer, schema, words):
    """A schema that the format cannot express is refused by tool, place and reason."""
    parameters = {"type": "object", "properties": {"a": schema}}
    with refused("tools", r"tools: store: ") as refusal:
        adjusted(tokenizer, tool(parameters, strict=True))
    assert words in str(refusal.value)


TYPES = ("string", "number", "boolean", "null")
SERVED = [
    {"type": "string", "pattern": "a+", "minLength": 2, "maxLength": 4},
    {"type": "string", "format": "date", "maxLength": 10},
    {"type": "string", "format": "uri", "enum": ["none", "http://a.b/#c"]},
    {"format": "date", "const": "soon"},
    {"type": "string", "pattern": r"^[\w\-[/]\d\S\D[^\s\d]\/\>\u00e9.$"},
    {"type": "string", "pattern": r"^[^\W\d]{2}\0?$"},
    {"type": "string", "pattern": "^$"},
    {"type": "number", "multipleOf": 1.5},
    {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 1.1},
    {"type": "integer", "multipleOf": 7, "minimum": -20000, "exclusiveMaximum": -7},
    {"type": "integer", "multipleOf": 1024, "maximum": 10**9},
    {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**63 - 1},
    {"type": "integer", "exclusiveMinimum": -3.5, "exclusiveMaximum": 3},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 0.1},
    {"type": "number", "minimum": 0.30000000000000004, "maximum": 1e300},
    {
        "anyOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": TEXT, "a": {"enum": [1, 2]}}},
        ]
    },
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, kind: {"type": kind}},
                "required": ["kind", kind],
            }
            for kind in ("string", "boolean")
        ]
    },
    {
        "oneOf": [
            {"type": "object", "properties": {"id": TEXT}, "required": ["id"]},
            {
                "type": "object",
                "properties": {"kind": {"const": "base"}, "base": TEXT},
                "required": ["base"],
                "additionalProperties": True,
            },
            {"type": "object", "properties": {"kind": {"const": "top"}}, "required": ["kind"]},
        ]
    },
    {"oneOf": [{"anyOf": [{"type": "string", "maxLength": 3}, TEXT]}, {"type": "null"}]},
    {"anyOf": [TEXT, {"type": "integer", "minimum": 3}]},
    {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    {"anyOf": [TEXT, {"enum": [1, 2]}, {"type": "object", "properties": {"b": TEXT}}]},
    {"enum": ["7", 7, "true", None, "null", "", {"a": ["1", 1, {}], "b": ""}, [], [[0.5]]]},
    {"type": "object", "additionalProperties": {"type": ["integer", "string"]}},
    {"anyOf": [{"type": "object", "additionalProperties": {"type": t}} for t in TYPES]},
    {
        "anyOf": [
            {"type": "object", "properties": {"a": {"type": t}}, "required": ["a"]} for t in TYPES
        ]
    },
    {"anyOf": [{"type": "array", "items": {"type": t}} for t in TYPES]},
    {"anyOf": [{"type": "array", "items": TEXT, "minItems": n, "maxItems": n} for n in (0, 3)]},
    {"enum": [f"ß{i}/" for i in range(3000)]},
]


@pytest.mark.parametrize("schema", SERVED, ids=lambda schema: repr(schema)[:99])
def test_what_strict_tools_may_ask(tokenizer, compiler, schema):
    """Strict tools follow lengths with patterns, multiples, large bounds and tagged records."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    for seed in range(8):
        check_call(tokenizer, compiler, parameters, seed, 7)


def test_strings_that_a_pattern_allows(tokenizer, compiler):
    """A pattern is ASCII, may match anywhere, and never allows a marker's spelling."""
    for pattern, allowed, forbidden in (
        (r"^\d\w$", ["1a", "1_"], ["١a", "1é"]),
        (r"^[\w-~]$", ["-", "~", "a"], ["`", "}"]),
        (r"^[+-\d]$", ["-", "+", "3"], [",", "/"]),
        (r"^[^\w-]$", ["~", "é"], ["-", "a"]),
        ("b", ["abc", "\nb", "b|"], ["ac", "b<|tool_call>"]),
        ("^.$", ["a", ">", "é"], ["\n", "\u2028", "ab"]),
        (r"^[^\d]\W$", ["a ", "é!"], ["1 ", "aa"]),
        (r"^\s\S$", [" a"], ["aa", "  "]),
    ):
        parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
        request = adjusted(tokenizer, tool({**parameters, "required": ["a"]}, strict=True))
        quote = tokenizer.convert_tokens_to_ids('<|"|>')
        for text in allowed + forbidden:
            # Byte after byte, so that a marker's spelling is not a marker.
            letters = [token for letter in text for token in encoded(tokenizer, letter)]
            tokens = [
                *encoded(tokenizer, "<|tool_call>call:store{a:"),
                *[quote, *letters, quote],
                *encoded(tokenizer, "}<tool_call|>"),
            ]
            accepted = machine(compiler, request).accept_tokens("", tokens)
            assert accepted == (text in allowed), (pattern, text)


@pytest.mark.parametrize(
    ("key", "is_key"),
    [
        *[(key, True) for key in ("$gt", "a.b", "Content-Type", "Due date", "2024", "é", "/x/@y")],
        *[(key, False) for key in ('"a"', " a", "a ", "a<", "a[0]", "")],
    ],
)
def test_keys_of_a_free_object(tokenizer, compiler, key, is_key):
    """A free object may have every key that the reader accepts unquoted."""
    parameters = {"type": "object", "properties": {"a": {"type": "object"}}}
    request = adjusted(tokenizer, tool(parameters, strict=True))
    call = f"<|tool_call>call:store{{a:{{b:{{{key}:5}}}}}}<tool_call|>"
    tokens = encoded(tokenizer, call)
    assert machine(compiler, request).accept_tokens("", tokens) == is_key
    if is_key:
        ((_, arguments),) = read_whole(tokenizer, request, tokens)
        assert json.loads(arguments) == {"a": {"b": {key: 5}}}


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"json": {"type": "object", "properties": {"b": TEXT}}}, ['{"b": "x"}', "{}"]),
        ({"regex": r"a/[\d]+\/"}, ["a/12/"]),
        ({"choice": ["yes", "n.o"]}, ["yes", "n.o"]),
    ],
    ids=["json", "regex", "choice"],
)
def test_a_call_or_a_form(tokenizer, compiler, fields, texts):
    """With ``auto`` and a constraint the answer is a call or satisfies the constraint."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    request = tool_request([tool(parameters, strict=True)], tool_choice="auto")
    request.structured_outputs = StructuredOutputsParams(**fields)
    constrained = gemma_parser(tokenizer).adjust_request(request)
    for text in [*texts, "<|tool_call>call:store{a:1}<tool_call|>"]:
        tokens = [*encoded(tokenizer, text), END]
        grammar = machine(compiler, constrained)
        assert grammar.accept_tokens("", tokens), text
        assert grammar.is_terminated()
    for text in ("z", "n-o", "<|tool_call>call:store{a:x}"):
        tokens = encoded(tokenizer, text)
        assert not machine(compiler, constrained).accept_tokens("", tokens)


def test_a_call_or_ebnf(tokenizer):
    """An EBNF grammar together with tools is refused, since another back end follows it."""
    request = tool_request([tool({}, strict=True)], tool_choice="auto")
    request.structured_outputs = StructuredOutputsParams(grammar='root ::= "a"')
    both = gemma_parser(tokenizer).adjust_request(request).structured_outputs
    with pytest.raises(VLLMValidationError, match="EBNF cannot be combined with tools"):
        read_constraint(both, StructuredOutputsConfig())


@pytest.mark.parametrize(
    ("strict", "keywords"),
    [
        (False, {"properties": {"a": {"type": "string", "pattern": "a+"}}}),
        (False, {"properties": {"a": {"type": "string", "minimum": 3}}}),
        (False, {"properties": {"a": {"type": "string", "format": "date"}}}),
        (False, {"properties": {"a": {"type": "array", "uniqueItems": True}}}),
        (False, {"properties": {"a": {"oneOf": [TEXT, {"enum": ["b"]}]}}}),
        (False, {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}),
        # An alternative that allows nothing leaves the others; zod and OpenAPI write null so.
        *(
            (True, {"properties": {"a": {"anyOf": [TEXT, alternative]}}})
            for alternative in (
                False,
                {"enum": []},
                {"type": "string", "enum": [1]},
                {"type": "string", "nullable": True, "enum": [None]},
            )
        ),
    ],
    ids=repr,
)
def test_tools_that_have_a_grammar(tokenizer, strict, keywords):
    """A strict tool omits an alternative without values, and one that is not strict has a grammar,
    of any object if its schema cannot be followed.
    """
    request = adjusted(tokenizer, tool({"type": "object", **keywords}, strict=strict))
    assert request.structured_outputs.structural_tag


def test_all_refused_tools_are_named(tokenizer):
    """A refusal names every refused tool with the place in its schema."""
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [tool(parameters, name, strict=True) for name in ("one", "two")]
    with pytest.raises(
        VLLMValidationError, match=r"one: parameters\.a\.not.*two: parameters\.a\.not"
    ):
        adjusted(tokenizer, tool({}, "fine"), *tools)


def test_a_schema_cannot_multiply(tokenizer):
    """Doubling references and deep schemas are refused before they are expanded."""
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
            adjusted(tokenizer, tool(parameters, strict=True))


def test_tools_are_read_once_and_off_the_event_loop(tokenizer, monkeypatch):
    """Tools that an endpoint has read are not read again by the constraint or the parser."""
    threads: list[str] = []
    real = schema_reader.plain_schema

    def noted(schema: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(schema)

    monkeypatch.setattr(schema_reader, "plain_schema", noted)
    parameters = {"type": "object", "properties": {"once_only": {"type": "integer"}}}
    request = tool_request([tool(parameters), tool(parameters, "strict", strict=True)])
    asyncio.run(read_tools_aside(request.tools))
    parser = gemma_parser(tokenizer)
    parser.adjust_request(request)
    text = "<|tool_call>call:store{once_only:1}<tool_call|>"
    assert parser.parse(text, request, enable_auto_tools=True)[2]
    assert len(threads) == 2
    assert all(name.startswith("constraint") for name in threads)


def test_schemas_of_all_tools_are_bounded_together(tokenizer):
    """Strict tools beyond the bound are refused, and others are called with any object."""
    parameters = {"type": "object", "properties": {"a": {**TEXT, "description": "b" * 10**5}}}
    for strict in (True, False):
        tools = [tool(parameters, f"tool{i}", strict=strict) for i in range(11)]
        if strict:
            with pytest.raises(VLLMValidationError, match="together may have 1000000 characters"):
                adjusted(tokenizer, *tools)
        else:
            tag = adjusted(tokenizer, *tools).structured_outputs.structural_tag
            assert "anything" in tag
