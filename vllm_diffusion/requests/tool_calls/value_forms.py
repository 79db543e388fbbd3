"""Forms that the arguments of a tool call may have, one or more for each JSON type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scalar:
    """A value out of a list; any number, boolean or null without one.

    Attributes:
        values: Allowed values; ``None`` for all.
    """

    values: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Text:
    """A string.

    Attributes:
        min_length: Characters.
        max_length: Characters; ``None`` for any number.
        pattern: Expression that is found in it; ``None`` for any string.
    """

    min_length: int = 0
    max_length: int | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class Number:
    """A number within bounds.

    Attributes:
        rule: Body of the grammar's rule.
    """

    rule: str


@dataclass(frozen=True)
class Items:
    """An array."""

    item: Value
    min_items: int = 0
    max_items: int | None = None


@dataclass(frozen=True)
class Members:
    """Object with properties.

    Attributes:
        properties: Types by name, in the order in which Gemma's chat template writes them.
        required: Names of required properties.
        others: Type of properties with any other name; ``None`` if there may be none.
    """

    properties: Mapping[str, Value]
    required: frozenset[str]
    others: Value | None = None


Form = Scalar | Text | Number | Items | Members


@dataclass(frozen=True)
class Value:
    """Type of one value.

    Attributes:
        forms: Allowed forms for each JSON type; empty for a value of any kind.
    """

    forms: Mapping[str, tuple[Form, ...]]


ANYTHING = Value({})
