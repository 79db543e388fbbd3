"""Figures of the house: how large and how entangled the tree is, counted from its files.

``python -m tests.support.house`` prints them beside what was recorded in ``tests/house.json`` and
what is aimed at. ``tests/unit/test_house.py`` fails where one is above its record. To record what
a change makes of them:

    python -m tests.support.house --record
    python -m tests.support.house --record --reason "package code lines: a family more"

The first form takes in figures that fell. One that rose needs a reason, which begins with its name
and stays beside it in the file.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx
from rich.console import Console
from rich.table import Table

from vllm_diffusion.hooks.upstream import read_symbols

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "house.json"
PACKAGES = ("vllm_diffusion", "attention_kernels")
# What a family or a rule says of its canvases, which the layouts alone should read.
FAMILY_FLAGS = frozenset(
    {
        "is_aligned",
        "is_block_causal",
        "is_seeded",
        "is_shifted",
        "seeds_greedily",
        "commit_verifies",
        "can_finish_kv",
        "moves_tokens",
        "judges_to_end",
        "num_choices",
    }
)
ROOMS_OF_FLAGS = ("decoding", "families")
WITHOUT_SUBJECT = re.compile(r"(Of|What|Whether|Those|As|Where|Which|How)\b")
_LAYOUT_TOKENS = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    }
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file.

    Attributes:
        path: Relative to the root.
        text: Its content.
        tree: Its syntax tree.
    """

    path: Path
    text: str
    tree: ast.Module

    def docstrings(self) -> Iterator[ast.Expr]:
        """Docstring nodes of the module, its classes and its functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, Documented) and ast.get_docstring(node) is not None:
                statement = node.body[0]
                assert isinstance(statement, ast.Expr)
                yield statement

    def docstring_lines(self) -> set[int]:
        """Numbers of the lines that docstrings occupy."""
        return {
            line
            for docstring in self.docstrings()
            for line in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
        }

    def num_code_lines(self) -> int:
        """Number of lines with code, without docstrings, comments and blank lines."""
        lines = {
            line
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
            if token.type not in _LAYOUT_TOKENS
            for line in range(token.start[0], token.end[0] + 1)
        }
        return len(lines - self.docstring_lines())


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Python files below folders of the root."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found.append(Source(path.relative_to(ROOT), text, ast.parse(text)))
    return tuple(found)


def code_lines(*folders: str) -> int:
    """Code lines of folders, in hundreds of lines rounded up."""
    return -(-sum(source.num_code_lines() for source in sources(*folders)) // 100) * 100


def all_lines() -> int:
    """Lines of the package with comments and blank lines, in hundreds rounded up."""
    return -(-sum(len(source.text.splitlines()) for source in sources(*PACKAGES)) // 100) * 100


def docstring_lines() -> int:
    """Lines of the package's docstrings, in hundreds rounded up."""
    return -(-sum(len(source.docstring_lines()) for source in sources(*PACKAGES)) // 100) * 100


def flag_reads() -> int:
    """Reads of family flags outside the rooms that own them."""
    return sum(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and node.attr in FAMILY_FLAGS
        for source in sources("vllm_diffusion")
        if source.path.parts[1] not in ROOMS_OF_FLAGS
        for node in ast.walk(source.tree)
    )


def largest_file() -> int:
    """Lines of the package's longest file."""
    return max(len(source.text.splitlines()) for source in sources(*PACKAGES))


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """Names of a class's instance attributes: fields, and what its methods set on ``self``."""
    fields = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    assigned = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return fields | assigned


def largest_class() -> int:
    """Instance attributes of the package's largest class."""
    return max(
        len(attributes_of(node))
        for source in sources(*PACKAGES)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    )


def docstrings_without_subject() -> float:
    """Per cent of the package's docstrings that begin with neither a verb nor a noun."""
    texts = [
        ast.literal_eval(docstring.value).strip()
        for source in sources(*PACKAGES)
        for docstring in source.docstrings()
    ]
    return round(100 * sum(bool(WITHOUT_SUBJECT.match(text)) for text in texts) / len(texts), 1)


def module_of(path: Path) -> str:
    """``vllm_diffusion/live/__init__.py`` -> ``vllm_diffusion.live``."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """``vllm_diffusion.canvas.slots`` -> ``canvas``."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "vllm_diffusion" else package


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [_module_named(node.module, alias.name) for alias in node.names]
        yield from (name for name in names if name.partition(".")[0] in PACKAGES)


def _module_named(package: str, name: str) -> str:
    """The module that ``from package import name`` reads: a file of its own, or the package."""
    below = ROOT.joinpath(*package.split("."), name)
    return f"{package}.{name}" if below.is_dir() or below.with_suffix(".py").is_file() else package


def arrows() -> Iterator[tuple[str, str, Path]]:
    """Imports of the package: the room that imports, the room that is imported, and the file."""
    for source in sources(*PACKAGES):
        if source.path == Path("vllm_diffusion/__init__.py"):
            continue
        for module in imported(source.tree):
            yield room_of(module_of(source.path)), room_of(module), source.path


def room_arrows() -> int:
    """Pairs of rooms of which one imports the other."""
    return len({(at, to) for at, to, _ in arrows() if at != to})


def circles() -> list[list[str]]:
    """Groups of files that import one another in a circle."""
    graph = networkx.DiGraph(
        (module_of(source.path), module)
        for source in sources(*PACKAGES)
        for module in imported(source.tree)
    )
    groups = networkx.strongly_connected_components(graph)
    return [sorted(group) for group in groups if len(group) > 1]


def replaced_symbols() -> int:
    """Functions and values of vLLM in whose place something of ours is put."""
    return sum(symbol.use in ("replaced", "assigned") for symbol in read_symbols())


def private_symbols() -> int:
    """Symbols of vLLM that are private by name, or replaced."""
    return sum(symbol.is_private for symbol in read_symbols())


def readme_words() -> int:
    """Words of the README."""
    return len((ROOT / "README.md").read_text(encoding="utf-8").split())


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Attributes:
        count: Counts it from the tree.
        aim: What it should come down to; ``None`` where it is reported only.
    """

    count: Callable[[], float]
    aim: float | None


FIGURES: dict[str, Figure] = {
    "package code lines": Figure(lambda: code_lines(*PACKAGES), 18_500),
    "test code lines": Figure(lambda: code_lines("tests"), 25_000),
    "benchmark, example and docs code lines": Figure(
        lambda: code_lines("benchmarks", "examples", "docs"), 5_600
    ),
    "all lines of the package": Figure(all_lines, None),
    "docstring lines of the package": Figure(docstring_lines, None),
    "symbols of vLLM replaced": Figure(replaced_symbols, 26),
    "private symbols of vLLM": Figure(private_symbols, 150),
    "reads of family flags": Figure(flag_reads, 0),
    "largest file": Figure(largest_file, 400),
    "attributes of the largest class": Figure(largest_class, 15),
    "docstrings without a subject, %": Figure(docstrings_without_subject, 3),
    "arrows between rooms": Figure(room_arrows, 60),
    "circles": Figure(lambda: len(circles()), 0),
    "README words": Figure(readme_words, 450),
}


@dataclass(frozen=True)
class Recorded:
    """What the file holds of a figure.

    Attributes:
        value: The most it may be.
        reason: Why it last rose; empty where it never did.
    """

    value: float
    reason: str = ""


def read_record() -> dict[str, Recorded]:
    """Recorded figures by name."""
    if not RECORD.is_file():
        return {}
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: Recorded(**row) for name, row in rows.items()}


def write_record(figures: dict[str, Recorded]) -> None:
    """Write one figure a line."""
    lines = []
    for name, recorded in figures.items():
        row: dict[str, float | str] = {"value": recorded.value}
        if recorded.reason:
            row["reason"] = recorded.reason
        lines.append(f" {json.dumps(name)}: {json.dumps(row)}")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def risen(measured: dict[str, float], known: dict[str, Recorded]) -> list[str]:
    """Names of figures above their record, or without one."""
    return [
        name
        for name, value in measured.items()
        if name not in known or (FIGURES[name].aim is not None and value > known[name].value)
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table, or record it; exit status 1 if a figure rose and no reason is given."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.house", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write tests/house.json")
    parser.add_argument(
        "--reason",
        action="append",
        default=[],
        metavar='"FIGURE: WHY"',
        help="why a figure rose; once for each that did",
    )
    arguments = parser.parse_args(argv)
    reasons = dict(reason.partition(": ")[::2] for reason in arguments.reason)
    measured = {name: figure.count() for name, figure in FIGURES.items()}
    known = read_record()
    table = Table("figure", "recorded", "now", "aim", "why it rose")
    for name, value in measured.items():
        was, aim = known.get(name), FIGURES[name].aim
        table.add_row(
            name,
            f"{was.value:g}" if was else "",
            f"{value:g}",
            "reported" if aim is None else f"{aim:g}",
            was.reason if was else "",
        )
    Console().print(table)
    unexplained = [name for name in risen(measured, known) if name in known and name not in reasons]
    if unexplained:
        print(f"above the record, and no --reason: {', '.join(unexplained)}", file=sys.stderr)
        return 1
    if arguments.record:
        write_record(
            {
                name: Recorded(
                    value, reasons.get(name, known[name].reason if name in known else "")
                )
                for name, value in measured.items()
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
