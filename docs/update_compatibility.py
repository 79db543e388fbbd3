"""Write the table of private symbols in ``docs/compatibility.md``.

python docs/update_compatibility.py
"""

from __future__ import annotations

from pathlib import Path

from vllm_diffusion.upstream import TABLE  # noqa: TID251 (the ban is for attention_kernels)

PAGE = Path(__file__).with_name("compatibility.md")
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def with_table(page: str) -> str:
    """``page`` with its table made anew."""
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}{table()}{END}{tail}"


def table() -> str:
    rows = ["", "| symbol | use | why |", "|---|---|---|"]
    rows += [f"| `{symbol.path}` | {symbol.use.value} | {symbol.reason} |" for symbol in TABLE]
    return "\n".join(rows) + "\n\n"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
