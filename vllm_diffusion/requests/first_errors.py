"""Protocols that stop at the first bad item of a list.

pydantic makes an error of each alternative of each bad item: a byte of ``input`` of
``/v1/responses`` costs 100 KB and more. It stops at the first where the schema of a list says
``fail_fast``, which vLLM's protocols do not. What is accepted stays the same.
"""

import gc
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator

# Kinds of schemas whose values have any number of items, each of which may be bad.
_MANY = ("list", "tuple", "set", "frozenset", "dict")
# Keys of a schema that hold no further schemas.
_VALUES = ("default", "metadata", "serialization")


def stop_at_first_errors() -> None:
    """Have all that reads bodies in this process stop at the first bad item of a list.

    To be called once the server's routes are there. FastAPI has an adapter for each route's body,
    and ``/invocations`` has some of its own, which nothing else names.
    """
    for found in gc.get_objects():
        if type(found) is TypeAdapter and found.pydantic_complete:
            _stop(found)


def _stop(adapter: TypeAdapter[Any]) -> None:
    # Otherwise models within the schema keep the validators that they have.
    adapter.validator = SchemaValidator(_stopping(adapter.core_schema), _use_prebuilt=False)


def _stopping(schema: Any) -> Any:
    """Copy a schema with lists that stop at their first error."""
    if isinstance(schema, (list, tuple)):
        return type(schema)(map(_stopping, schema))
    if not isinstance(schema, dict):
        return schema
    copy = {key: value if key in _VALUES else _stopping(value) for key, value in schema.items()}
    # Fields of a model may be named "type" too.
    if schema.get("type") in _MANY:
        copy["fail_fast"] = True
    return copy
