"""Counts the size and the imports of the tree: ``python -m tests.support.house``.

``tests/unit/test_architecture.py`` has the rules that must hold; the sizes are for comparisons.
"""

import ast
import io
import tokenize
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx
from rich.console import Console
from rich.table import Table

from tests.support.models.specs import diffusion_gemma_spec
from tests.support.vllm_symbols import is_private_path
from vllm_diffusion.cli.main import build_parser
from vllm_diffusion.hooks.upstream import read_symbols
from vllm_diffusion.requests.arguments import argument_names
from vllm_diffusion.startup.plugin_settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vllm_diffusion", "attention_kernels")
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
    """Return the Python files below folders of the root."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found.append(Source(path.relative_to(ROOT), text, ast.parse(text)))
    return tuple(found)


def code_lines(*folders: str) -> int:
    """Count the lines with code of folders."""
    return sum(source.num_code_lines() for source in sources(*folders))


def module_of(path: Path) -> str:
    """Return a file's module: ``vllm_diffusion/live/__init__.py`` -> ``vllm_diffusion.live``."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """Return the room of a module: ``vllm_diffusion.canvas.slots`` -> ``canvas``."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "vllm_diffusion" else package


def imported(tree: ast.Module) -> Iterator[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [_module_named(node.module, alias.name) for alias in node.names]
        yield from (name for name in names if name.partition(".")[0] in PACKAGES)


def _module_named(package: str, name: str) -> str:
    """Return the module that ``from package import name`` reads: a file or the package."""
    below = ROOT.joinpath(*package.split("."), name)
    return f"{package}.{name}" if below.is_dir() or below.with_suffix(".py").is_file() else package


def arrows() -> Iterator[tuple[str, str, Path]]:
    """Return the package's imports: the importing room, the imported room and the file."""
    for source in sources(*PACKAGES):
        if source.path == Path("vllm_diffusion/__init__.py"):
            continue
        for module in imported(source.tree):
            yield room_of(module_of(source.path)), room_of(module), source.path


def room_arrows() -> int:
    """Return pairs of rooms, the first of which imports the second."""
    return len({(at, to) for at, to, _ in arrows() if at != to})


def circles() -> list[list[str]]:
    """Return groups of files that import one another in a circle."""
    graph = networkx.DiGraph(
        (module_of(source.path), module)
        for source in sources(*PACKAGES)
        for module in imported(source.tree)
    )
    groups = networkx.strongly_connected_components(graph)
    return [sorted(group) for group in groups if len(group) > 1]


def replaced_symbols() -> int:
    """Return the functions and values of vLLM that are replaced."""
    return sum(symbol.use in ("replaced", "assigned") for symbol in read_symbols())


def private_symbols() -> int:
    """Return the symbols of vLLM that are private by name, or replaced."""
    return sum(
        symbol.use in ("replaced", "assigned", "kernel") or is_private_path(symbol.path)
        for symbol in read_symbols()
    )


def commands() -> list[ArgumentParser]:
    """Return the parsers of ``vllm-diffusion``'s commands and of their own commands."""
    found, waiting = [], [build_parser()]
    while waiting:
        parser = waiting.pop()
        below = [a for a in parser._actions if isinstance(a, _SubParsersAction)]
        found += [parser] * (not below)
        waiting += [command for action in below for command in action.choices.values()]
    return found


def main() -> None:
    """Print the figures."""
    table = Table("figure", "now")
    for name, value in (
        ("code lines of the package", code_lines(*PACKAGES)),
        ("of the tests", code_lines("tests")),
        ("of benchmarks, examples and docs", code_lines("benchmarks", "examples", "docs")),
        ("symbols of vLLM that are replaced", replaced_symbols()),
        ("that are private, or replaced", private_symbols()),
        ("settings of a start", len(SETTINGS)),
        ("arguments of a request", len(argument_names(diffusion_gemma_spec(32)))),
        ("commands", len(commands())),
        ("their arguments", sum(len(command._actions) - 1 for command in commands())),
        ("pairs of rooms of which one imports the other", room_arrows()),
    ):
        table.add_row(name, f"{value:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
