"""Tables of the documentation that are made from the package's data.

A page has each table between two markers, ``<!-- table: options -->`` and ``<!-- end of options
-->``.

    python docs/tables.py              # names the pages whose tables are not those of the data
    python docs/tables.py --write      # writes the tables into the pages
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from docs import pass_example
from tests.support.families.published import ExpectedDraft, expected_drafts, published_files
from tests.support.families.published import families as families_of_files
from vllm_diffusion.decoding.layouts import CanvasLayout, FreeCanvas
from vllm_diffusion.drafting.presets import presets
from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.hooks.upstream import read_symbols
from vllm_diffusion.requests.exclusions import EXCLUSIONS
from vllm_diffusion.startup.options import sentences
from vllm_diffusion.startup.published_checkpoints import CheckpointFamily, checkpoint_families
from vllm_diffusion.startup.published_runs import (
    NEUTRAL,
    PublishedRun,
    published_runs,
    sampling_changes,
)

if TYPE_CHECKING:
    from vllm_diffusion.decoding.rule import DecodingRule
    from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/RESULTS.md"])
# Measured figures, as tables of this file.
RESULTS = ROOT / "benchmarks/results.toml"
# What starts on the null GPU chose, took and asked of the driver, by case.
REHEARSAL = ROOT / "tests/null_gpu/rehearsal.json"
# Where the id of a published checkpoint was read.
SOURCES = {
    "publisher": "the publisher's repository",
    "hub": "a page of the hub",
    "others": "several third parties",
    "one": "**one third party**",
}
# Name of sampling without any parameter.
PLAIN = "temperature 1, no filters"


def replaced() -> str:
    """List the methods of vLLM that are replaced, each with its reason and with what would end
    it.
    """
    # Names of vLLM's are too long for a column beside sentences. A backslash ends a line.
    return "".join(
        f"- `{symbol.path}`, in {_code(symbol.files)}\\\n"
        f"  {symbol.reason}\\\n"
        f"  *Until:* {symbol.until}\n"
        for symbol in read_symbols()
        if symbol.use == "replaced"
    )


def symbols() -> str:
    """Count the other symbols of vLLM that are relied on, by package of vLLM and kind of use."""
    uses = ("assigned", "overridden", "kernel", "private", "called")
    counts = Counter(
        (".".join(symbol.path.partition(":")[0].split(".")[:3]), symbol.use)
        for symbol in read_symbols()
        if symbol.use in uses
    )
    packages = sorted({package for package, _ in counts})
    rows = [
        [f"`{package}`", *(str(counts[package, use] or "") for use in uses)] for package in packages
    ]
    return _table(["package of vLLM", *uses], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; cells must have no bare ``|``."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def options() -> str:
    """List every option of ``vllm serve`` that is refused, with the sentence of its refusal."""
    # A placeholder may be a field of vLLM's configuration, whose last part is its name.
    rows = [
        [f"`{name}`", re.sub(r"\{[\w.]*?(\w+)\}", r"{\1}", sentence)]
        for name, sentence in sentences().items()
    ]
    return _table(["option", "what the server says"], rows)


def exclusions() -> str:
    """List the fields of a request that exclude one another."""
    beside: dict[tuple[str, str, str], list[str]] = {}
    for row in EXCLUSIONS:
        beside.setdefault((row.other, row.reason, row.where), []).append(row.field)
    rows = [
        [_code(fields), f"`{other}`, {reason}", where or "all"]
        for (other, reason, where), fields in beside.items()
    ]
    return _table(["a request with", "cannot have", "models"], rows)


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def checkpoints() -> str:
    """List the published checkpoints that are served, in a section for each family."""
    return "\n".join(map(_checkpoints_of, checkpoint_families()))


def _checkpoints_of(family: CheckpointFamily) -> str:
    rows = [
        [
            f"`{checkpoint.id}`",
            f"{checkpoint.billions:g}B"
            + (f" ({checkpoint.active:g}B active)" if checkpoint.active else ""),
            checkpoint.format + (f", {checkpoint.gb:g} GB" if checkpoint.gb else ""),
            checkpoint.memory,
            checkpoint.licence,
            SOURCES[checkpoint.source],
            _files_seen(checkpoint.id),
        ]
        for checkpoint in family.checkpoint
    ]
    head = ["checkpoint", "parameters", "format, files", "GPU memory", "licence", "id read in"]
    head.append("small files")
    command = _wrapped(family.command(family.checkpoint[0]))
    return (
        f"### {family.name}\n\n```sh\n{command}\n```\n\n{_table(head, rows)}\n"
        f"- Checked: {family.checked}.\n- Open: {family.open}.\n"
    )


def _files_seen(checkpoint: str) -> str:
    """Return how much of a checkpoint's small files was found."""
    forms = [
        form
        for files in published_files()
        if files.id == checkpoint
        for name, form in files.sources.items()
        if name == "config.json"
    ]
    if not forms:
        return "never seen"
    return "whole" if any("(whole file" in form for form in forms) else "values"


def starts() -> str:
    """List what a start makes of the published files, in a section for each family."""
    return "\n".join(map(_starts_of, families_of_files()))


def _starts_of(family: Mapping[str, Any]) -> str:
    names = {
        "block": "block",
        "steps": "steps",
        "mask": "mask",
        "ends": "ends",
        "context": "context",
    }
    rows = []
    for row in family["checkpoint"]:
        values = {"mask": "none", **family["values"], **row.get("values", {})}
        revision = f" at {row['revision']}" if "revision" in row else ""
        ends = ", ".join(str(end).replace("|", r"\|") for end in values["ends"])
        sampling = _values(values["sampling"]) or PLAIN
        cells = [f"{values[name]:,}" if name == "context" else str(values[name]) for name in names]
        cells[list(names).index("ends")] = _code([ends]) if ends.startswith("<") else ends or "-"
        rows.append(
            [f"`{row['id'].split('/')[1]}`{revision}", f"`{values['rule']}`", *cells, sampling]
        )
    said = [f"- {name.capitalize()}: {source}." for name, source in family["sources"].items()]
    head = ["checkpoint", "rule", *names, "sampling"]
    differs = family["differs"]
    return f"**{family['name']}**: {differs}.\n\n{_table(head, rows)}\n" + "\n".join(said) + "\n"


def published_drafts() -> str:
    """List what is read of published drafts, and the presets whose files were not found."""
    rows = [_draft_row(draft) for draft in expected_drafts()]
    seen = {draft.id for draft in expected_drafts()}
    unseen = [preset for preset in presets() if preset.draft not in seen]
    rows += [[f"`{preset.draft}`", *["-"] * 5, "never seen"] for preset in unseen]
    head = ["draft", "block", "mask", "target's layers", "causal", "window", "file"]
    return _table(head, rows)


def _draft_row(draft: ExpectedDraft) -> list[str]:
    values = {"block": "-", "mask": "-", **draft.values}
    causal = f"{values['causal']} of {values['layers']}" if "causal" in values else "-"
    window = str(values["window"]) if "window" in values else "none" if causal != "-" else "-"
    layers = ", ".join(map(str, values.get("target_layers", []))) or "-"
    cells = [f"`{draft.id}`", str(values["block"]), str(values["mask"])]
    return [*cells, layers, causal, window, _files_seen(draft.id)]


def _wrapped(command: str) -> str:
    """Break a command between its options into lines that a page shows whole."""
    options = re.sub(r" (?!--)", "\0", command)
    lines = textwrap.wrap(options, 96, subsequent_indent="    ", break_on_hyphens=False)
    return " \\\n".join(lines).replace("\0", " ")


def families() -> str:
    """List the architectures by how their blocks lie and by their decoding rules."""
    alike: dict[tuple[str, str], list[str]] = {}
    for family in FAMILIES:
        entry = resolve_name(family.engine_config)
        row = (_layout(entry), _code(entry.rule_names()))
        alike.setdefault(row, []).append(family.architecture)
    rows = [[_code(architectures), *row] for row, architectures in alike.items()]
    return _table(["architecture", "blocks", "rules, the default first"], rows)


def rules() -> str:
    """List the settings and presets of the decoding rules, each with the rules that have it."""
    found: dict[str, DecodingRule] = {}
    for family in FAMILIES:
        entry = resolve_name(family.engine_config)
        is_masked = hasattr(entry, "mask_token_id")
        for name, run in entry.rules.items():
            found.setdefault(name, run.rule(*([0] if is_masked else [])))
    having: dict[tuple[str, str, str], list[str]] = {}
    for name, rule in found.items():
        rows = [(f"`{key}`", each.values, each.meaning) for key, each in rule.settings.items()]
        rows += [(f'`preset` `"{key}"`', "", _values(of)) for key, of in rule.presets.items()]
        for row in rows or [("none of its own", "", "")]:
            having.setdefault(row, []).append(name)
    table = [[row[0], _code(names), *row[1:]] for row, names in having.items()]
    return _table(["setting", "rules", "values", "meaning"], table)


def published() -> str:
    """List what a request without settings gets, and what each publisher runs, by family."""
    rows: dict[str, list[list[str]]] = {}
    sources: dict[str, list[str]] = {}
    entries = {family.architecture: resolve_name(family.engine_config) for family in FAMILIES}
    runs = published_runs()
    for run in runs:
        rule = run.rule or next(iter(entries[_architecture(run.family)].rules))
        # DiffusionGemma's loop has no settings of its own but those of the file.
        own_settings = entries[_architecture(run.family)].rules[rule].settings or run.settings
        settings = {
            name: value for name, value in own_settings.items() if name != "max_denoising_steps"
        }
        given = [r.sampling for r in runs if r.family == run.family and r.kind == "checkpoint"]
        served = given[0] if given else None
        title = f"{run.family}, `{rule}`" if run.rule else run.family
        if title not in rows:
            own = "as its `generation_config.json`, which was not found"
            sampling = own if served is None else _values(served) or PLAIN
            rows[title] = [["**served**", sampling, _values(settings), ""]]
            sources[title] = []
        # A checkpoint's file is what is served.
        kind = "served" if run.kind == "checkpoint" else run.kind
        sources[title].append(f"- {kind.capitalize()}: {run.source}.")
        if run.kind == "checkpoint":
            continue
        of_run = {**run.settings, **({"block": run.block_length} if run.block_length else {})}
        sampling = _values(run.sampling) or PLAIN
        row = [kind, sampling, _values(of_run), _request(run, served, settings)]
        rows[title].append(row)
    head = ["what", "sampling", "settings", "a request that gets it"]
    return "\n".join(
        f"**{title}**\n\n{_table(head, of_title)}\n" + "\n".join(sources[title]) + "\n"
        for title, of_title in rows.items()
    )


def _architecture(family: str) -> str:
    return next(r.architectures[0] for r in published_runs() if r.family == family)


def _values(values: Mapping[str, object]) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in values.items())


def _request(
    run: PublishedRun, served: Mapping[str, float] | None, settings: Mapping[str, float | str]
) -> str:
    """Return the fields with which a request gets a published run."""
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


def _read_results() -> dict[str, dict[str, Any]]:
    """Return the measured figures and, as ``machines``, the machines on which they were
    measured.
    """
    with RESULTS.open("rb") as file:
        return tomllib.load(file)


def measured(name: str) -> str:
    """Return a table of measured figures, and a line that says how to measure it again.

    Args:
        name: Name of the table in ``benchmarks/results.toml``.
    """
    result = _read_results()[name]
    where = f"{result['date']}, commit {result['commit']}, load: {result['load']}"
    target = f" Target: {result['threshold']}." if result["threshold"] else ""
    table = _table(result["columns"], result["rows"])
    return f"{table}\nMeasured by `{result['command']}` ({where}).{target}\n"


def _rehearsed(pattern: str) -> list[tuple[re.Match[str], dict[str, Any]]]:
    """Return the rehearsal's cases whose whole names match, each with its data."""
    cases = json.loads(REHEARSAL.read_text(encoding="utf-8"))
    matches = ((re.fullmatch(pattern, name), found) for name, found in cases.items())
    return [(match, found) for match, found in matches if match is not None]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def published_shape() -> str:
    """List what the 26B shape chose, asked of the driver and took on the null GPU, by capability
    and format.
    """
    chosen, memory = [], []
    for match, found in _rehearsed(r"26B, ([\w-]+), (\d+\.\d)"):
        weights, capability = match.groups()
        if not found["starts"]:
            chosen.append([capability, weights, found["error"], *[""] * 5])
            continue
        sizes, asked = found["bytes"], found["steady"]["plain"]
        counted = ("graphs", "kernels_in_graphs", "kernels")
        chosen.append(
            [
                *(capability, weights, *_kernels(found["kernels"])),
                *(str(asked[what]) for what in counted),
                f"{asked['copies']}, {asked['waits_for_events']}",
            ]
        )
        memory.append(
            [
                *(capability, weights),
                *(_gib(sizes[part]) for part in ("weights", "largest pass", "graphs", "kv cache")),
                *(f"{found['kv_cache_tokens']:,}", str(found["max_num_seqs"])),
            ]
        )
    for rows in (chosen, memory):
        rows.sort(key=lambda row: (float(row[0]), row[1]))
    asked_head = ["replays", "kernels in graphs", "other kernels", "copies, waits"]
    sizes_head = ["weights, GiB", "largest pass, GiB", "graphs, GiB", "KV cache, GiB"]
    return "\n".join(
        [
            _table(["capability", "weights", "products", "experts", *asked_head], chosen),
            _table(
                ["capability", "weights", *sizes_head, "tokens in the KV cache", "requests"], memory
            ),
        ]
    )


def _kernels(logged: Iterable[str]) -> tuple[str, str]:
    """Return the kernels of quantised products and of experts in what vLLM logs of its choices."""
    text = "\n".join(logged)
    products = re.findall(r"^Selected (\w+) for|^Using (\w+) for NVFP4 GEMM", text, re.MULTILINE)
    experts = re.findall(r"^Using '?(\w+)'? \w+ MoE backend", text, re.MULTILINE)
    names = [(a or b).removesuffix("LinearKernel") for a, b in products]
    return ", ".join(names) or "cuBLAS", ", ".join(experts)


def small_gpus() -> str:
    """List what GPUs of 24 and 32 GiB have room for, by the starts of the null GPU."""
    rows = []
    for match, found in _rehearsed(r"26B, ([\w-]+), a (\w+)(?:, canvases of \d+)?"):
        weights, gpu = match.groups()
        if not found["starts"]:
            rows.append([gpu, weights, "", "is refused", *[""] * 6])
            continue
        sizes, tokens = found["bytes"], found["kv_cache_tokens"]
        # The smallest graph is of one.
        canvas = found["capture_sizes"][0]
        rows.append(
            [
                *(gpu, weights, str(canvas)),
                *(_gib(sizes[part]) for part in ("device", "weights", "largest pass", "graphs")),
                *(_gib(sizes["kv cache"]), f"{tokens:,}"),
                f"{tokens / found['max_model_len']:.1f} of {found['max_model_len']:,}",
            ]
        )
    head = [
        "GPU",
        "weights",
        "canvas",
        "memory, GiB",
        "weights, GiB",
        "largest pass, GiB",
        "graphs, GiB",
    ]
    return _table(
        [*head, "KV cache, GiB", "tokens in the KV cache", "whole requests"], sorted(rows)
    )


def example(part: Callable[[], Iterable[Sequence[str]]]) -> str:
    """Show a part of the pass that ``docs/pass_example.py`` runs."""
    head, *rows = part()
    return _table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "replaced": replaced,
    "symbols": symbols,
    "options": options,
    "exclusions": exclusions,
    "checkpoints": checkpoints,
    "starts": starts,
    "published_drafts": published_drafts,
    "families": families,
    "published": published,
    "rules": rules,
    **{name: partial(measured, name) for name in _read_results() if name != "machines"},
    "published_shape": published_shape,
    "small_gpus": small_gpus,
    "pass_by_request": partial(example, pass_example.by_request),
    "pass_by_row": partial(example, pass_example.by_row),
    "pass_by_slot": partial(example, pass_example.by_slot),
    "pass_for_engine": partial(example, pass_example.for_engine),
}
_PART = re.compile(
    r"^<!-- table: (?P<name>\w+) -->\n.*?^<!-- end of (?P=name) -->$", re.MULTILINE | re.DOTALL
)


def with_tables(page: str) -> str:
    """Return the text of a page with the current tables between its markers.

    Raises:
        KeyError: If a marker names no table.
    """
    return _PART.sub(
        lambda part: (
            f"<!-- table: {part['name']} -->\n\n{TABLES[part['name']]()}\n"
            f"<!-- end of {part['name']} -->"
        ),
        page,
    )


def stale_pages() -> dict[Path, str]:
    """Return the pages whose tables are not those of the data, each with the text that it should
    have.
    """
    pages = {path: path.read_text(encoding="utf-8") for path in PAGES}
    current = {path: with_tables(text) for path, text in pages.items()}
    return {path: text for path, text in current.items() if text != pages[path]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Keep the tables of the documentation current.")
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    is_writing = parser.parse_args().write
    stale = stale_pages()
    for path, text in stale.items():
        print(path.relative_to(ROOT))
        if is_writing:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and not is_writing else 0


if __name__ == "__main__":
    raise SystemExit(main())
