"""Random parameters of tools, and vLLM's requests and parsers for them."""

from typing import Any

from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from tests.support.engines.vllm_configs import vllm_config
from vllm_diffusion.checkpoints import shipped_checkpoint

NAMES = st.text("abcdefgh_ÜÉ€09-", min_size=1, max_size=5)
WORDS = st.text('abc{}[],:"\\\n €<|>é', max_size=5)
# Strings that are spelled like values of other types.
NUMERALS = st.sampled_from(["7", "-0.5", "true", "null", "[]", "{a:1}"])
CONSTANTS = st.recursive(
    st.one_of(st.integers(-9, 9), st.none(), WORDS, NUMERALS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)
SCALARS = st.one_of(
    st.just({"type": "string"}),
    st.fixed_dictionaries(
        {"type": st.just("string"), "maxLength": st.integers(3, 6)},
        optional={"minLength": st.integers(0, 3)},
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": st.integers(-99, 0), "exclusiveMaximum": st.integers(1, 120)},
    ),
    st.fixed_dictionaries(
        {"type": st.just("integer"), "multipleOf": st.integers(1, 12)},
        optional={"minimum": st.integers(0, 1)},
    ),
    st.sampled_from(["date", "uuid", "email", "time", "uri", "int32"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.sampled_from(["^[a-z]+$", "b", "^[^a]{2}$", "^(a|b)c?", r"^\d{3}\s\w$"]).map(
        lambda text: {"type": "string", "pattern": text}
    ),
    st.just({"type": "integer", "x-order": 1, "markdownDescription": {"not": {}}}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({}),
    st.just({"type": ["string", "null"]}),
    st.just({"type": "object"}),
    st.just({"anyOf": [{"type": "integer"}, {"type": "string"}]}),
    st.lists(
        st.one_of(st.integers(-99, 99), st.booleans(), st.none(), WORDS, NUMERALS, CONSTANTS),
        min_size=1,
        max_size=4,
    ).map(lambda values: {"enum": values}),
    st.one_of(st.integers(-9, 9), st.floats(-9, 9, width=16), st.just("on")).map(
        lambda value: {"const": value}
    ),
)


def _object(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:num_required],
        "additionalProperties": False,
    }


def _objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(_object, st.dictionaries(NAMES, values, max_size=4), st.integers(0, 4))


def _arrays(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda items, low, more: {
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + more,
        },
        values,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def _one_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return objects that are distinguished by a property that each one alone requires."""
    return {
        "oneOf": [
            {
                **schema,
                "properties": {**schema["properties"], f"only {i}": {}},
                "required": [*schema["required"], f"only {i}"],
                "additionalProperties": True,
            }
            for i, schema in enumerate(schemas)
        ]
    }


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        _objects(inner).map(lambda schema: {"anyOf": [schema, {"type": "null"}]}),
        _arrays(inner).map(lambda schema: {"oneOf": [{"type": "null"}, schema]}),
        st.lists(inner, min_size=2, max_size=3).map(lambda schemas: {"anyOf": schemas}),
        st.lists(_objects(inner), min_size=2, max_size=3).map(_one_of),
        inner.map(lambda schema: {"type": "object", "additionalProperties": schema}),
    ),
    max_leaves=5,
)
PARAMETERS = _objects(VALUES)


def tool(parameters: Any, name: str = "store", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def tool_request(tools: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    """Return a chat that demands a call of one of ``tools``."""
    messages = [{"role": "user", "content": "Call it."}]
    return ChatCompletionRequest(
        model="tiny", messages=messages, **{"tools": tools, "tool_choice": "required"} | fields
    )


def gemma_parser(tokenizer: Any, *, is_diffusion: bool = True) -> Any:
    """Return vLLM's parser of an answer, as the server makes it for a request."""
    from vllm.parser.parser_manager import ParserManager

    parser_cls = ParserManager.get_parser(
        tool_parser_name="gemma4", reasoning_parser_name="gemma4", enable_auto_tools=True
    )
    assert parser_cls is not None
    checkpoint = None if is_diffusion else shipped_checkpoint("qwen3")
    return parser_cls(tokenizer, None, model_config=vllm_config(checkpoint).model_config)
