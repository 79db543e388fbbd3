"""Imports point one way: down the floors of docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vllm_diffusion", "attention_kernels")


def floors() -> list[list[str]]:
    """Rooms by floor, from the top."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```floors\n(.*?)```", text, flags=re.DOTALL)
    return [line.split(", ") for line in block.splitlines()]


def room_of(module: str) -> str:
    """``vllm_diffusion.canvas.slots`` -> ``canvas``."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "vllm_diffusion" else package


def imported(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module]
        yield from (name for name in names if name.partition(".")[0] in PACKAGES)


def test_imports_point_down() -> None:
    """A room knows the rooms on lower floors, and none beside or above it."""
    floor = {room: i for i, rooms in enumerate(floors()) for room in rooms}
    arrows = [
        (room_of(".".join(path.relative_to(ROOT).with_suffix("").parts)), room_of(module), path)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.parent != ROOT / "vllm_diffusion" or path.stem != "__init__"
        for module in imported(path)
    ]
    assert {room for arrow in arrows for room in arrow[:2]} == set(floor)
    wrong = {
        f"{path.relative_to(ROOT)} -> {to}"
        for at, to, path in arrows
        if at != to and floor[at] >= floor[to]
    }
    assert not wrong
