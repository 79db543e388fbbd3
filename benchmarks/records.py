"""What scripts have in common: their options, the rows that they find, and tables of ``gpu-figures.md``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "develop" / "gpu-figures.md"
# What tests and examples share with benchmarks. Behind a script's own folder, and before packages: one of an
# example's name may be installed.
sys.path[1:1] = [str(ROOT), str(ROOT / "examples" / "checkpoints")]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script, by its docstring, with the option that all of them have."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    return parser


class Rows:
    """Rows as they are found: each is printed, and kept where somebody wants it.

    A file has a line of JSON for each, so that a benchmark that is stopped leaves those before. Every line
    names the ``table`` that it is a row of; the other keys are the table's columns.
    """

    def __init__(self, path: Path | None) -> None:
        """Begin.

        Args:
            path: The file; ``None`` keeps nothing.
        """
        self._path = path
        self._heads: tuple[str, ...] = ()
        if path is not None:
            path.write_text("", encoding="utf-8")

    def add(self, table: str, **columns: Any) -> None:
        """Append a row to the file, and print it, behind the table's heads where it is the first."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"table": table, **columns}) + "\n")
        heads, line, row = markdown(list(columns), [list(columns.values())]).splitlines()
        if self._heads != (table, *columns):
            self._heads = (table, *columns)
            print(f"\n{table}\n\n{heads}\n{line}")
        print(row, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def flat(text: Any) -> str:
    """Return a text on one line."""
    return " ".join(str(text).split())


def markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table; cells that are ``None`` are empty, and others have one line."""
    head, *lines = (
        f"| {' | '.join('' if cell is None else flat(cell) for cell in line)} |\n"
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
