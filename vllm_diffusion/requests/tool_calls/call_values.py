"""Arguments of a call in Gemma's format, as values of the types that they are written in.

The format tells a string, which stands between two markers, from a number, a boolean and null,
which stand as they are. vLLM's reader drops the markers and guesses the types from the schema, so a
string ``7`` beside an integer would be the integer. Here its reader gets each string with a sign,
and the types are those of the text.
"""

import json
import math
from typing import Any

from vllm_diffusion.requests.json_schema import json_types
from vllm_diffusion.requests.tool_calls.value_forms import ANYTHING, Items, Members, Value

QUOTE = '<|"|>'
# No tokenizer writes it where a value begins.
_SIGN = "\0"


def with_signs(arguments: str) -> str:
    """Return the text of a call's arguments with a sign at the begin of each string."""
    parts = arguments.split(QUOTE)
    return QUOTE.join(_SIGN + part if i % 2 else part for i, part in enumerate(parts))


def typed(value: Any, to: Value) -> Any:
    """Return a value that was read from a text with signs.

    Args:
        value: String, list or mapping.
        to: What a schema allows. A string or literal of another type is made one of these where
            that can be, as vLLM does it: free models put numbers between markers, or a word without
            them.
    """
    if isinstance(value, dict):
        members = _only(to, "object", Members)
        others = members.others or ANYTHING if members else ANYTHING
        named = members.properties if members else {}
        return {
            key.removeprefix(_SIGN): typed(item, named.get(key.removeprefix(_SIGN), others))
            for key, item in value.items()
        }
    if isinstance(value, list):
        items = _only(to, "array", Items)
        return [typed(item, items.item if items else ANYTHING) for item in value]
    text = value.removeprefix(_SIGN)
    read = text if value.startswith(_SIGN) else _literal(text)
    if not to.forms or json_types(read) & to.forms.keys():
        return read
    from vllm.tool_parsers.utils import coerce_to_schema_type

    return coerce_to_schema_type(text, sorted(to.forms))


def _only(to: Value, name: str, kind: type) -> Any:
    """Return the form of a type if there is one; alternatives say nothing for certain of what is in
    them.
    """
    forms = to.forms.get(name, ())
    return forms[0] if len(forms) == 1 and isinstance(forms[0], kind) else None


def _literal(text: str) -> Any:
    """Return the number, boolean or null of a text, or the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite and not isinstance(value, (list, dict)) else text
