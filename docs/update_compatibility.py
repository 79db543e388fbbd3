"""Write the tables of ``docs/develop/hooks.md``, ``docs/use/options.md`` and ``docs/use/families.md``.

python docs/update_compatibility.py
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.hooks.upstream import read_symbols
from vllm_diffusion.layouts import CanvasLayout, FreeCanvas
from vllm_diffusion.plugin import imported
from vllm_diffusion.startup.option_table import (
    OptionRow,
    read_rows,
)
from vllm_diffusion.startup.published_runs import (
    NEUTRAL,
    PublishedRun,
    published_runs,
    sampling_changes,
)

if TYPE_CHECKING:
    from vllm_diffusion.decoding.rule import DecodingRule
    from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig

# Of sampling without any parameter.
PLAIN = "temperature 1, no filters"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def symbols() -> str:
    """The symbols of vLLM that are replaced, and of the others how many each package of vLLM has."""
    known = read_symbols()
    rows = ["", "| replaced | why | what of vLLM would end it |", "|---|---|---|"]
    rows += [
        f"| `{symbol.path}` | {symbol.reason} | {symbol.until} |"
        for symbol in known
        if symbol.use == "replaced"
    ]
    uses = ("assigned", "overridden", "kernel", "private", "called")
    rows += ["", f"| package of vLLM | {' | '.join(uses)} |", "|---" * (len(uses) + 1) + "|"]
    counts = Counter(
        (".".join(symbol.path.partition(":")[0].split(".")[:3]), symbol.use) for symbol in known
    )
    for package in sorted({package for package, use in counts if use in uses}):
        cells = (str(counts[package, use] or "") for use in uses)
        rows.append(f"| `{package}` | {' | '.join(cells)} |")
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
    """Every family, what its publisher samples with, and every decoding rule with its settings."""
    rows = ["", "| architecture | blocks | rules, the default first |", "|---|---|---|"]
    rules: dict[str, DecodingRule] = {}
    for family in FAMILIES:
        entry = imported(family.engine_config)
        names = ", ".join(f"`{name}`" for name in entry.rule_names())
        for name, published in entry.rules.items():
            is_masked = hasattr(entry, "mask_token_id")
            rules.setdefault(name, published.rule(*([0] if is_masked else [])))
        rows.append(f"| `{family.architecture}` | {_layout(entry)} | {names} |")
    rows += _published_sampling()
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


def _published_sampling() -> list[str]:
    """What a request gets that sets nothing, and how it gets what the publisher runs."""
    head = "| family | what | sampling | settings | a request that gets it | source |"
    rows = ["", "### What publishers sample with", "", head, "|---|---|---|---|---|---|"]
    entries = {family.architecture: imported(family.engine_config) for family in FAMILIES}
    runs = published_runs()
    done = set()
    for run in runs:
        rule = run.rule or next(iter(entries[_architecture(run.family)].rules))
        # DiffusionGemma's loop has no settings of its own but those of the file.
        published = entries[_architecture(run.family)].rules[rule].settings or run.settings
        settings = {name: published[name] for name in published if name != "max_denoising_steps"}
        given = [r.sampling for r in runs if r.family == run.family and r.kind == "checkpoint"]
        served = given[0] if given else None
        title = f"{run.family}, `{rule}`" if run.rule else run.family
        if title not in done:
            done.add(title)
            own = "as its `generation_config.json`, which was not found"
            sampling = own if served is None else _values(served) or PLAIN
            rows.append(f"| {title} | **served** | {sampling} | {_values(settings)} | | |")
        kind = "`generation_config.json`" if run.kind == "checkpoint" else run.kind
        of_run = {**run.settings, **({"block": run.block_length} if run.block_length else {})}
        request = "" if run.kind == "checkpoint" else _request(run, served, settings)
        rows.append(
            f"| {title} | {kind} | {_values(run.sampling) or PLAIN} | {_values(of_run)} | {request} | {run.source} |"
        )
    return rows


def _architecture(family: str) -> str:
    return next(r.architectures[0] for r in published_runs() if r.family == family)


def _values(values: Mapping[str, object]) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in values.items())


def _request(
    run: PublishedRun, served: Mapping[str, float] | None, settings: Mapping[str, float | str]
) -> str:
    """The fields with which a request gets a published run."""
    if served is None:
        fields: dict[str, object] = {"temperature": NEUTRAL["temperature"]} | dict(run.sampling)
    else:
        fields = {
            name: there for name, (_, there) in sampling_changes(served, run.sampling).items()
        }
    arguments = {
        f"diffusion_{name}": value
        for name, value in run.settings.items()
        if settings[name] != value
    }
    if run.block_length is not None:
        arguments["diffusion_canvas_length"] = run.block_length
    if arguments:
        fields["vllm_xargs"] = arguments
    return f"`{json.dumps(fields)}`"


def _layout(entry: type[BlockDiffusionEngineConfig]) -> str:
    length = getattr(entry, "block_length", None)
    if length is None:
        return f"as `canvas_length` says, {FreeCanvas.summary}"
    layout: type[CanvasLayout] = getattr(entry, "layout", FreeCanvas)
    return f"{length}, {layout.summary}"


TABLES = {"develop/hooks.md": symbols, "use/options.md": options, "use/families.md": families}


def with_table(name: str, page: str) -> str:
    """``page`` with its table made anew.

    Args:
        name: Path of the page in ``docs``.
        page: Its text.
    """
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}{TABLES[name]()}{END}{tail}"


if __name__ == "__main__":
    for name in TABLES:
        path = Path(__file__).parent / name
        path.write_text(with_table(name, path.read_text(encoding="utf-8")), encoding="utf-8")
