"""Imports point one way: down the floors of docs/develop/architecture.md, and never in a circle."""

from __future__ import annotations

import re

from tests.support.house import ROOT, arrows, circles


def floors() -> list[list[str]]:
    """Rooms by floor, from the top."""
    text = (ROOT / "docs/develop/architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```floors\n(.*?)```", text, flags=re.DOTALL)
    return [line.split(", ") for line in block.splitlines()]


def test_imports_point_down() -> None:
    """A room knows the rooms on lower floors, and none beside or above it."""
    floor = {room: i for i, rooms in enumerate(floors()) for room in rooms}
    assert {room for arrow in arrows() for room in arrow[:2]} == set(floor)
    wrong = {f"{path} -> {to}" for at, to, path in arrows() if at != to and floor[at] >= floor[to]}
    assert not wrong


def test_no_circles() -> None:
    """No files import one another, for type checkers alone either."""
    assert not circles()
