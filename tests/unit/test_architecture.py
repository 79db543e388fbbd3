"""Imports follow docs/develop/architecture.md: only to lower floors, and never in a circle."""

from __future__ import annotations

import re

from tests.support.house import ROOT, arrows, circles


def floors() -> list[list[str]]:
    """Return the rooms of each floor, from the top."""
    text = (ROOT / "docs/develop/architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```floors\n(.*?)```", text, flags=re.DOTALL)
    return [line.split(", ") for line in block.splitlines()]


def test_imports_point_down() -> None:
    """A room imports only rooms on lower floors, and none on its own floor or above."""
    floor = {room: i for i, rooms in enumerate(floors()) for room in rooms}
    assert {room for arrow in arrows() for room in arrow[:2]} == set(floor)
    wrong = {f"{path} -> {to}" for at, to, path in arrows() if at != to and floor[at] >= floor[to]}
    assert not wrong


def test_no_circles() -> None:
    """No files import one another, not even for type checkers."""
    assert not circles()
