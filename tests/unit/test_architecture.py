"""Imports follow docs/develop/architecture.md, only to lower floors and never in a circle, and a
folder has no more code than pyproject.toml lets it have.
"""

import re
import tomllib

import pytest

from tests.support.house import ROOT, arrows, circles, code_lines, sources

with (ROOT / "pyproject.toml").open("rb") as file:
    MOST_CODE_LINES = tomllib.load(file)["tool"]["vllm-diffusion"]["most-code-lines"]


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


@pytest.mark.parametrize("folder", MOST_CODE_LINES)
def test_no_more_code_than_allowed(folder: str) -> None:
    """A folder has at most the lines of code of its ceiling; a commit that raises one says why."""
    assert code_lines(folder) <= MOST_CODE_LINES[folder]


def test_each_folder_has_a_ceiling() -> None:
    """No folder of the package or of the tests is left out."""
    below = (path for top in ("vllm_diffusion", "tests") for path in (ROOT / top).glob("*/"))
    with_code = {folder for path in below if sources(folder := str(path.relative_to(ROOT)))}
    assert with_code <= set(MOST_CODE_LINES)
