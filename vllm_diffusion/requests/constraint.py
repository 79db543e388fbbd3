"""A request's structured output: read once, and written as the engine's back end follows it.

llguidance follows all but EBNF, which xgrammar does. Canvases and the autoregressive mode share
this, whichever endpoint the constraint came by.
"""

import functools
import json
import re
from typing import Any

from vllm_diffusion.requests import bounds
from vllm_diffusion.requests.guidance import EBNF, GUIDANCE
from vllm_diffusion.requests.json_schema import SchemaError, guided_schema, json_text
from vllm_diffusion.requests.readers import Reading, compiling_problem, read_aside
from vllm_diffusion.requests.refusals import CONSTRAINT, refuse
from vllm_diffusion.requests.tool_calls.tag_grammar import tag_grammar

XGRAMMAR = "xgrammar"
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# An attribute of a constraint that was read; it says what was read then.
_READ = "_read_by_vllm_diffusion"
# White space and how an expression repeats it or chooses from it: nothing else may stand between
# parts.
_WHITE_SPACE = re.compile(r"(?:[ \t\r\n]|\\[sntr]|[\[\])?*+|]|\((?:\?:)?|\{[0-9]*,?[0-9]*\})*")


def read_constraint(constraint: Any, config: Any) -> None:
    """Write a request's constraint as its back end follows it, or refuse it.

    The work is done once, also where the parameters are used again.

    Args:
        constraint: vLLM's ``StructuredOutputsParams``, changed in place; ``None`` for none.
        config: vLLM's ``StructuredOutputsConfig``.

    Raises:
        VLLMValidationError: Naming the field; the server answers 400.
    """
    if constraint is not None and not _is_read(constraint):
        with Reading():
            _read(constraint, config)


async def read_constraint_aside(constraint: Any, config: Any) -> None:
    """As :func:`read_constraint`, while the event loop serves others."""
    if constraint is not None and not _is_read(constraint):
        await read_aside(_read, constraint, config)


def _is_read(constraint: Any) -> bool:
    return getattr(constraint, _READ, None) == _value(constraint)


def _value(constraint: Any) -> tuple[str, Any]:
    """Return the kind of a constraint and what it says."""
    for kind in _KINDS:
        if (value := getattr(constraint, kind)) is not None:
            return kind, value
    return "", None


def _read(constraint: Any, config: Any) -> None:
    kind, value = _value(constraint)
    white_space = _white_space(constraint, config)
    try:
        kind, written, back_end = _written(kind, _text(kind, value), white_space)
    except SchemaError as error:
        refuse(CONSTRAINT, f": {error}.")
    for name in _KINDS:
        setattr(constraint, name, written if name == kind else None)
    constraint._backend = back_end
    setattr(constraint, _READ, (kind, written))


def _white_space(constraint: Any, config: Any) -> str:
    """Return the expression of what may follow a comma or a colon of JSON; it may be left out each
    time.
    """
    pattern = constraint.whitespace_pattern
    if constraint.disable_any_whitespace or config.disable_any_whitespace:
        return ""
    if pattern is None:
        return " ?"
    if not _WHITE_SPACE.fullmatch(pattern) or compiling_problem("regex", f"(?:{pattern})?"):
        refuse(
            CONSTRAINT,
            f"has whitespace_pattern={pattern!r}, which may match only white space, such as "
            "'[ \\n]?'.",
        )
    return f"(?:{pattern})?"


def _text(kind: str, value: Any) -> str:
    """Return what a constraint says as text, once it is known to be of the right type and no larger
    than allowed.

    Raises:
        SchemaError: Naming the kind.
    """
    if kind == "json_object":
        if value is not True:
            raise SchemaError(
                "json_object must be true; leave structured_outputs out for a free answer"
            )
        return '{"type": "object"}'
    if kind == "choice":
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(text, str) for text in value)
        ):
            raise SchemaError("choice must be a list of at least one string")
        if len(value) > bounds.MOST_CHOICES:
            raise SchemaError(
                f"choice may have at most {bounds.MOST_CHOICES} entries; got {len(value)}"
            )
    if not isinstance(value, str) and (kind == "json" or isinstance(value, (dict, list, bool))):
        value = json_text(value)
    if not isinstance(value, str) or (kind != "regex" and not value.strip()):
        raise SchemaError(f"{kind} must be a non-empty string")
    if len(value) > bounds.MOST_CONSTRAINT:
        raise SchemaError(
            f"{kind} may have at most {bounds.MOST_CONSTRAINT} characters; got {len(value)}"
        )
    return value


@functools.lru_cache(maxsize=16)
def _written(kind: str, text: str, white_space: str) -> tuple[str, Any, str]:
    """Return a constraint's kind, value and back end for the engine.

    Raises:
        SchemaError: If no back end follows it.
    """
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    if kind in ("json", "json_object"):
        return "json", guided_schema(text, white_space), GUIDANCE
    if kind == "structural_tag":
        return "grammar", tag_grammar(text, white_space), GUIDANCE
    is_ebnf = kind == "grammar" and not grammar_is_likely_lark(text)
    if problem := compiling_problem(EBNF if is_ebnf else kind, text):
        raise SchemaError(f"{kind} is not supported: {problem}")
    if is_ebnf:
        return kind, text, XGRAMMAR
    return kind, json.loads(text) if kind == "choice" else text, GUIDANCE
