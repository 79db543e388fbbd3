"""Tables that scripts write into ``benchmarks/RESULTS.md``, between two marks with their name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).with_name("RESULTS.md")


def markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table; cells that are ``None`` are empty."""
    head, *lines = (
        f"| {' | '.join('' if cell is None else str(cell) for cell in line)} |\n"
        for line in [heads, *rows]
    )
    return head + "|" + "---|" * len(heads) + "\n" + "".join(lines)


def part(page: str, name: str) -> tuple[str, str, str]:
    """Cut a page before and behind its part of a name; the marks stay with the rest.

    Raises:
        ValueError: If it has no such part.
    """
    before, begin, rest = page.partition(f"<!-- {name} -->\n")
    inside, end, after = rest.partition(f"<!-- end of {name} -->\n")
    if not begin or not end:
        raise ValueError(f"{DOCUMENT} has no part between <!-- {name} --> and its end")
    return before + begin, inside, end + after


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with another text in a part; arguments and error as of :func:`part`."""
    before, _, after = part(page, name)
    return f"{before}\n{text}\n{after}"


def write_part(name: str, text: str) -> None:
    """Replace a part of the document."""
    page = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_part(page, name, text), encoding="utf-8")


def read_table(name: str) -> list[Mapping[str, str]]:
    """Return the rows of the document's part, by the heads of its table."""
    _, inside, _ = part(DOCUMENT.read_text(encoding="utf-8"), name)
    lines = [line.split("|")[1:-1] for line in inside.splitlines() if line.startswith("|")]
    heads, _, *rows = ([cell.strip() for cell in line] for line in lines)
    return [dict(zip(heads, row, strict=True)) for row in rows]
