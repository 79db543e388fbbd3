"""What one argument of a tool call may be, as far as a call in Gemma's format can say it.

From these both sides of a call are made: its grammar, and the schema that its reader (vLLM's parser)
gets the types back from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ToolSchemaError(ValueError):
    """A tool's schema asks for what a call of Gemma's cannot say, or contradicts itself."""


@dataclass(frozen=True)
class Scalar:
    """A number, boolean, null or string out of a list; any of its type without one.

    Attributes:
        values: What is allowed; ``None`` for all.
    """

    values: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Text:
    """A string.

    Attributes:
        min_length: Characters.
        max_length: Characters; ``None`` for any number.
    """

    min_length: int = 0
    max_length: int | None = None


@dataclass(frozen=True)
class Items:
    """An array."""

    item: Value
    min_items: int = 0
    max_items: int | None = None


@dataclass(frozen=True)
class Members:
    """An object.

    Attributes:
        properties: In the order in which Gemma's chat template writes them.
        required: Their names.
        others: What properties of any other name hold; ``None`` if there may be none.
    """

    properties: Mapping[str, Value]
    required: frozenset[str]
    others: Value | None = None


Form = Scalar | Text | Items | Members


@dataclass(frozen=True)
class Value:
    """What one value may be.

    Attributes:
        forms: Per JSON type the forms that it may have; empty for a value of any kind, which the
            reader hands on as text.
    """

    forms: Mapping[str, tuple[Form, ...]]

    def schema(self) -> dict[str, Any]:
        """The schema from which the reader gets the types back."""
        if not self.forms:
            return {}
        schema: dict[str, Any] = {"type": sorted(self.forms)}
        for form in (form for forms in self.forms.values() for form in forms):
            if isinstance(form, Members):
                schema["properties"] = {k: v.schema() for k, v in form.properties.items()}
            elif isinstance(form, Items):
                schema["items"] = form.item.schema()
        return schema


ANYTHING = Value({})
