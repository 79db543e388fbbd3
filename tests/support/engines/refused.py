"""Reads tables of what a start refuses or logs, ``refused.toml`` next to their tests."""

import tomllib
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tests.support.engines.vllm_configs import configure


def rows_of(test: str, kind: str) -> list[Any]:
    """Return the rows of a kind in the table next to a test's file, as parameters."""
    table = tomllib.loads(Path(test).with_name("refused.toml").read_text("utf-8"))
    return [pytest.param(row, id=row.get("says", str(row))) for row in table[kind]]


def refusal(checkpoint: Path, **options: Any) -> str:
    """Return the message with which the configuration is refused, of one sentence or two."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        configure(checkpoint, **options)
    message = str(raised.value)
    if isinstance(raised.value, pydantic.ValidationError):
        (only,) = raised.value.errors()
        message = str(only["msg"]).removeprefix("Value error, ")
    assert "\n" not in message
    assert message.endswith(".")
    return message


def refusal_of_row(row: dict[str, Any], checkpoint: Path) -> str:
    """Return the message for a row's options and settings; check that it has the row's words."""
    options = row.get("options", {})
    if "settings" in row:
        options = options | {"additional_config": {"diffusion": row["settings"]}}
    message = refusal(checkpoint, **options)
    for part in row["says"].split(" ... "):
        assert part in message
    return message
