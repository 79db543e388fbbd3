"""Write the tables of ``docs/compatibility.md`` and ``docs/options.md``.

python docs/update_compatibility.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm_diffusion.startup.option_table import (  # noqa: TID251 (the ban is for attention_kernels)
    OptionRow,
    read_rows,
)
from vllm_diffusion.upstream import TABLE  # noqa: TID251

BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def symbols() -> str:
    """The private symbols of vLLM that are relied on."""
    rows = ["", "| symbol | use | why |", "|---|---|---|"]
    rows += [f"| `{symbol.path}` | {symbol.use.value} | {symbol.reason} |" for symbol in TABLE]
    return "\n".join(rows) + "\n\n"


def options() -> str:
    """What is known of every option of ``vllm serve``, by what becomes of it."""
    rows = read_rows()
    parts = [
        _section("Refused", "what the server says", [r for r in rows if r.line], _refusal),
        _section(
            "Served", "tried with", [r for r in rows if r.state == "works" or r.works], _trial
        ),
        _section("Refused by vLLM", "tried with", [r for r in rows if r.state == "vllm"], _trial),
        _section("Not tried", "why", [r for r in rows if r.state == "untried"], _why),
        _section("vLLM's alone", "what it is", [r for r in rows if r.state == "unreached"], _why),
    ]
    return "\n" + "\n".join(parts) + "\n"


def _section(
    title: str, column: str, rows: list[OptionRow], say: Callable[[OptionRow], str]
) -> str:
    lines = [f"## {title}", "", f"| options | {column} |", "|---|---|"]
    lines += [f"| {_code(row.names)} | {say(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _code(words: tuple[str, ...]) -> str:
    return ", ".join("`" + word.replace("|", "\\|") + "`" for word in words)


def _refusal(row: OptionRow) -> str:
    return row.line.replace("|", "\\|")


def _trial(row: OptionRow) -> str:
    tried = row.works if row.state == "refused" else (row.probe,) if row.probe else ()
    other = "; other tokens, since it changes the numbers" if row.tokens == "other" else ""
    return _code(tried) + other if tried else row.why


def _why(row: OptionRow) -> str:
    return row.why


TABLES = {"compatibility.md": symbols, "options.md": options}


def with_table(name: str, page: str) -> str:
    """``page`` with its table made anew.

    Args:
        name: Of the page's file.
        page: Its text.
    """
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}{TABLES[name]()}{END}{tail}"


if __name__ == "__main__":
    for name in TABLES:
        path = Path(__file__).with_name(name)
        path.write_text(with_table(name, path.read_text(encoding="utf-8")), encoding="utf-8")
