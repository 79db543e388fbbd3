"""What scripts have in common: their options, the rows that they find, and tables of
``gpu-figures.md``.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "develop" / "gpu-figures.md"
# What tests and examples share with benchmarks. Behind a script's own folder, and before packages:
# one of an example's name may be installed.
sys.path[1:1] = [str(ROOT), str(ROOT / "examples" / "checkpoints")]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script, by its docstring, with the option that all of them have."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    return parser


class Rows:
    """Rows as they are found: each is printed, and kept where somebody wants it.

    A file has a line of JSON for each, so that a benchmark that is stopped leaves those before.
    Every line names the ``table`` that it is a row of; the other keys are the table's columns.
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
        """Append a row to the file, and print it, behind the table's heads where it is the
        first.
        """
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


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with another text between the marks of a part, which it must have."""
    before, rest = page.split(f"<!-- {name} -->\n")
    _, after = rest.split(f"<!-- end of {name} -->\n")
    return f"{before}<!-- {name} -->\n\n{text}\n<!-- end of {name} -->\n{after}"


def write_part(name: str, text: str) -> None:
    """Replace a part of the document."""
    page = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_part(page, name, text), encoding="utf-8")
