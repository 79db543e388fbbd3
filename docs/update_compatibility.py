"""Write the tables of ``docs/compatibility.md``, ``docs/options.md`` and ``docs/families.md``.

python docs/update_compatibility.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.plugin import imported
from vllm_diffusion.startup.option_table import (
    OptionRow,
    read_rows,
)
from vllm_diffusion.upstream import TABLE

if TYPE_CHECKING:
    from vllm_diffusion.decoding.rule import DecodingRule
    from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig

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


def families() -> str:
    """Every family, and every decoding rule with its settings."""
    rows = ["", "| architecture | blocks | rules, the default first | published settings |"]
    rows.append("|---|---|---|---|")
    rules: dict[str, DecodingRule] = {}
    for family in FAMILIES:
        entry = imported(family.engine_config)
        names = ", ".join(f"`{name}`" for name in entry.rule_names())
        for name, published in entry.rules.items():
            is_masked = hasattr(entry, "mask_token_id")
            rules.setdefault(name, published.rule(*([0] if is_masked else [])))
        default = next(iter(entry.rules.values())).settings
        settings = ", ".join(f"`{name}` {value}" for name, value in default.items())
        layout = _layout(entry)
        rows.append(f"| `{family.architecture}` | {layout} | {names} | {settings or 'its file'} |")
    for name, rule in rules.items():
        rows += ["", f"### `{name}`", ""]
        if not rule.settings:
            rows.append("It has no settings.")
            continue
        rows += ["| setting | values | meaning |", "|---|---|---|"]
        for setting, value in rule.settings.items():
            rows.append(f"| `{setting}` | {value.values} | {value.meaning} |")
        for preset, values in rule.presets.items():
            chosen = ", ".join(f"`{setting}` {value}" for setting, value in values.items())
            rows.append(f'| `preset` `"{preset}"` | | {chosen} |')
    return "\n".join(rows) + "\n\n"


def _layout(entry: type[BlockDiffusionEngineConfig]) -> str:
    length = getattr(entry, "block_length", None)
    if length is None:
        return "as `canvas_length` says, where the known tokens end; causal behind them"
    layout = getattr(entry, "layout", {})
    where = "counted from the start" if layout.get("is_aligned") else "where the known tokens end"
    attend = "in both directions" if layout.get("is_block_causal") else "causal behind them"
    parts = [f"{length}, {where}", attend]
    if layout.get("is_seeded"):
        parts.append("the first token from the encoding pass")
    if layout.get("is_shifted"):
        parts.append("rows shifted by one")
    return "; ".join(parts)


TABLES = {"compatibility.md": symbols, "options.md": options, "families.md": families}


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
