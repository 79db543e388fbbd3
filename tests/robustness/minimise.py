"""The smallest request that still does what a larger one did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def minimise(body: Any, still_fails: Callable[[Any], bool], most_tries: int = 200) -> Any:
    """Leave out and shorten parts of ``body`` as long as it fails.

    Args:
        body: JSON that fails.
        still_fails: Whether another body does.
        most_tries: How often to ask.
    """
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(body):
            if tries == most_tries:
                return body
            tries += 1
            if still_fails(candidate):
                body, smaller = candidate, True
                break
    return body


def _smaller(value: Any) -> Iterator[Any]:
    """Values with one part left out or shortened, the largest parts first."""
    if isinstance(value, dict):
        for name in value:
            yield {key: part for key, part in value.items() if key != name}
        for name, part in value.items():
            for less in _smaller(part):
                yield {**value, name: less}
    elif isinstance(value, list):
        half = len(value) // 2
        if half > 1:
            yield value[:half]
            yield value[half:]
        if len(value) <= 8:
            for i in range(len(value)):
                yield value[:i] + value[i + 1 :]
            for i, part in enumerate(value):
                for less in _smaller(part):
                    yield [*value[:i], less, *value[i + 1 :]]
    elif isinstance(value, str) and len(value) > 1:
        half = len(value) // 2
        yield value[:half]
        yield value[half:]
