"""What a benchmark measured, as data beside what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class DataFile:
    """JSON lines, each written when it is known, so that a benchmark that is stopped leaves those before.

    Every line names the ``table`` that it is a row of; the other keys are the table's columns.
    """

    def __init__(self, path: Path | None) -> None:
        """Begin a file.

        Args:
            path: Where; ``None`` keeps nothing.
        """
        self._path = path
        if path is not None:
            path.write_text("", encoding="utf-8")

    def add(self, table: str, **columns: Any) -> None:
        """Append a row."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"table": table, **columns}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows
