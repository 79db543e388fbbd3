"""Finds what the package relies on of vLLM, in its source; ``python -m tests.support.vllm_symbols``
records it.

What is recorded, in ``vllm_diffusion/hooks/upstream_signatures.json``, is compared with the
installed vLLM at each start (:mod:`vllm_diffusion.hooks.upstream`).

The package's files are parsed, and its modules imported for what a syntax tree does not say: which
method of vLLM's a method of ours overrides, and which of vLLM's classes has a field. Nothing is
written by hand but the reason of a replacement, which stands beside it.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_diffusion.hooks import upstream

PACKAGE = Path(upstream.__file__).resolve().parents[1]
ENGINE = "vllm"
# From the one that is most specific about a symbol to the least specific one.
USES = ("replaced", "assigned", "overridden", "kernel", "private", "called")
# Attributes that Python gives to tuples with names, to protocols and to abstract classes.
_OF_PYTHON = frozenset(
    {"_abc_impl", "_is_protocol", "_is_runtime_protocol", "_fields", "_replace", "_asdict"}
)


def is_private(name: str) -> bool:
    """Return true if a name begins with an underscore and is none of Python's own."""
    return name.startswith("_") and not name.startswith("__") and name not in _OF_PYTHON


def is_private_path(path: str) -> bool:
    """Return true if a part of a symbol's path is private."""
    return any(map(is_private, path.replace(":", ".").split(".")))


@dataclass
class Found:
    """What is relied on of one symbol.

    Attributes:
        use: One of :data:`USES`.
        files: Files of ours that rely on it, relative to the package.
        reason: Why it is replaced; empty for other uses.
        until: What of vLLM would end the replacement; empty for other uses.
    """

    use: str
    files: set[str] = field(default_factory=set)
    reason: str = ""
    until: str = ""


class _Collection(dict[str, Found]):
    """Symbols by path."""

    def note(self, path: str, use: str, file: str, reason: str = "", until: str = "") -> None:
        found = self.setdefault(path, Found(use))
        found.files.add(file)
        if USES.index(use) <= USES.index(found.use):
            found.use = use
        if use == "replaced":
            found.reason, found.until = reason, until


def scan() -> dict[str, Found]:
    """Return symbols of vLLM that are relied on, by path, in alphabetical order."""
    found = _Collection()
    files = [_File(path) for path in sorted(PACKAGE.rglob("*.py"))]
    for file in files:
        file.note_names(found)
    modules = [importlib.import_module(file.module) for file in files if file.is_imported]
    _note_overrides(modules, found)
    _note_fields(files, found)
    return dict(sorted(found.items()))


class _File:
    """A file of this package with the objects that its names refer to."""

    def __init__(self, path: Path) -> None:
        self.name = path.relative_to(PACKAGE).as_posix()
        parts = (PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)
        self.module = ".".join(parts).removesuffix(".__init__")
        # Running a module that is run is not importing it.
        self.is_imported = path.name != "__main__.py"
        self.tree = _without_types(ast.parse(path.read_text(encoding="utf-8")))
        self.nodes = list(ast.walk(self.tree))
        self.aliases: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == ENGINE:
                        self.aliases[alias.asname or ENGINE] = (
                            alias.name if alias.asname else ENGINE
                        )
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                if node.module.partition(".")[0] == ENGINE:
                    for alias in node.names:
                        self.aliases[alias.asname or alias.name] = _member(node.module, alias.name)
            elif (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and (text := self.folded(node.value)) is not None
            ):
                self.constants[node.targets[0].id] = text

    def folded(self, node: ast.expr) -> str | None:
        """Return the string of an expression of constants, or ``None``."""
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return self.constants.get(name)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                parts = (self.folded(left), self.folded(right))
                return None if None in parts else "".join(part or "" for part in parts)
        return None

    def resolved(self, node: ast.expr) -> str | None:
        """Return the symbol of vLLM that an expression names, or ``None``."""
        match node:
            case ast.Name(id=name):
                return self.aliases.get(name)
            case ast.Attribute(value=value, attr=attr):
                owner = self.resolved(value)
                return None if owner is None or not _has_members(owner) else _member(owner, attr)
            case ast.Subscript(value=value):
                return self.resolved(value)
        return None

    def note_names(self, found: _Collection) -> None:
        """Add what is imported, read, assigned, replaced and named by strings."""
        for path in self.aliases.values():
            if ":" in path:
                found.note(path, _use_of(path), self.name)
        for node in self.nodes:
            match node:
                case ast.Attribute() if (symbol := self.resolved(node)) and ":" in symbol:
                    is_read = isinstance(node.ctx, ast.Load)
                    found.note(symbol, _use_of(symbol) if is_read else "assigned", self.name)
                case ast.Subscript(ctx=ast.Store() | ast.Del()) if symbol := self.resolved(node):
                    found.note(symbol, "assigned", self.name)
                case ast.Call(
                    func=ast.Name(id="replaces" | "replaces_call"), args=targets, keywords=keywords
                ):
                    why = {word.arg or "": self.folded(word.value) or "" for word in keywords}
                    for target in targets:
                        found.note(self.folded(target) or "", "replaced", self.name, **why)
                case ast.BinOp() | ast.Constant() if text := self.folded(node):
                    self._note_string(text, found)

    def _note_string(self, text: str, found: _Collection) -> None:
        """Add a symbol that a string names, as ``module.kernel`` or ``module:attribute``."""
        module, separator, name = text.rpartition(":" if ":" in text else ".")
        is_path = all(part.isidentifier() for part in (*module.split("."), *name.split(".")))
        if not is_path or not module.startswith(ENGINE + ".") or not _module(module):
            return
        if separator == ":":
            found.note(text, _use_of(text), self.name)
        elif is_private(name):
            found.note(f"{module}:{name}", "kernel", self.name)

    def defined(self) -> set[str]:
        """Return private names that this file defines, of its own or in its classes."""
        names = {
            node.name
            for node in self.nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        }
        names |= {
            node.attr
            for node in self.nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_self(node)
        }
        return names | {
            node.id
            for node in self.nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }

    def fields(self) -> Iterator[tuple[str, ast.Attribute]]:
        """Return attributes of objects that no import names."""
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and self.resolved(node) is None:
                yield node.attr, node


def _is_self(node: ast.Attribute) -> bool:
    match node.value:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def _without_types(tree: ast.Module) -> ast.Module:
    """Return a syntax tree without what is imported for annotations alone."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


def _use_of(path: str) -> str:
    return "private" if is_private_path(path) else "called"


@functools.cache
def _module(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _member(owner: str, name: str) -> str:
    """Return the path of a module's or class's member."""
    if ":" in owner:
        return f"{owner}.{name}"
    if not hasattr(_module(owner), name) and _module(f"{owner}.{name}"):
        return f"{owner}.{name}"
    return f"{owner}.{name}" if _is_module(owner, name) else f"{owner}:{name}"


@functools.cache
def _has_members(path: str) -> bool:
    """Return whether a symbol is a module or class, not data or a function."""
    module, _, names = path.partition(":")
    try:
        value = functools.reduce(getattr, names.split("."), _module(module)) if names else None
    except AttributeError:
        return False
    return value is None or isinstance(value, type)


def _is_module(owner: str, name: str) -> bool:
    return isinstance(getattr(_module(owner), name, None), types.ModuleType)


def _is_named(cls: type) -> bool:
    """Return whether a class is vLLM's and importable by its own name."""
    module = sys.modules.get(cls.__module__)
    is_engine = cls.__module__.partition(".")[0] == ENGINE
    return is_engine and getattr(module, cls.__qualname__, None) is cls


def _note_overrides(modules: list[types.ModuleType], found: _Collection) -> None:
    """Add methods of vLLM's classes that methods of ours override, also those of a mixin."""
    for module in modules:
        for cls in vars(module).values():
            if not isinstance(cls, type) or cls.__module__ != module.__name__:
                continue
            for ours in cls.__mro__:
                if ours.__module__.partition(".")[0] != PACKAGE.name:
                    continue
                for name, value in vars(ours).items():
                    owner = _owner(cls, name)
                    is_own = name == "__init__" or not name.startswith("__")
                    if owner and is_own and not name.startswith("_abc_"):
                        use = "overridden" if _is_method(value) else _use_of(name)
                        found.note(_path(owner, name), use, _file_of(ours))


def _is_method(value: Any) -> bool:
    return isinstance(value, (staticmethod, classmethod, property)) or inspect.isfunction(value)


def _owner(cls: type, name: str) -> type | None:
    """Return the first class of vLLM's above ``cls`` that has or sets an attribute."""
    return next((base for base in cls.__mro__ if _is_named(base) and sets(base, name)), None)


def sets(cls: type, name: str) -> bool:
    """Return whether a class itself has an attribute or sets it on its instances."""
    return (
        name in vars(cls)
        or name in vars(cls).get("__annotations__", ())
        or any(
            instruction.opname == "STORE_ATTR" and instruction.argval == name
            for code in _codes(cls)
            # Taking a function apart is slow, and few name the attribute at all.
            if name in code.co_names
            for instruction in dis.get_instructions(code)
        )
    )


@functools.cache
def _codes(cls: type) -> tuple[types.CodeType, ...]:
    functions = filter(inspect.isfunction, vars(cls).values())
    return tuple(inspect.unwrap(function).__code__ for function in functions)


def _path(cls: type, name: str) -> str:
    return f"{cls.__module__}:{cls.__qualname__}.{name}"


def _file_of(cls: type) -> str:
    source = sys.modules[cls.__module__].__file__
    assert source is not None
    return Path(source).relative_to(PACKAGE).as_posix()


def _note_fields(files: list[_File], found: _Collection) -> None:
    """Add private attributes that ours use of vLLM's objects, and methods that ours inherit."""
    for file in files:
        defined = file.defined()
        classes = [
            value
            for value in vars(sys.modules.get(file.module, types)).values()
            if isinstance(value, type) and value.__module__ == file.module
        ]
        for name, node in file.fields():
            if _is_self(node):
                owners = [owner for cls in classes if (owner := _owner(cls, name))]
                if not is_private(name):
                    owners = [owner for owner in owners if _is_method(vars(owner).get(name))]
            elif not is_private(name) or name in defined:
                continue
            else:
                owners = _owners_of(name, _receiver(node), frozenset(file.aliases.values()))
            for owner in owners:
                found.note(_path(owner, name), _use_of(name), file.name)


def _receiver(node: ast.Attribute) -> str:
    """Return the name of an attribute's object: ``parallelconfig`` of ``a.parallel_config._b``."""
    return ast.unparse(node.value).rpartition(".")[2].replace("_", "").lower()


@functools.cache
def _owners_of(name: str, receiver: str, imported: frozenset[str]) -> list[type]:
    """Return the classes of vLLM's that an attribute may belong to.

    They are those that are named as what has the attribute, else those of modules that the file
    imports, else all.
    """
    owners = [cls for cls in _engine_classes() if sets(cls, name)]
    named = [cls for cls in owners if cls.__name__.lower() == receiver]
    near = [cls for cls in owners if any(cls.__module__ in path for path in imported)]
    return named or near or owners


@functools.cache
def _engine_classes() -> tuple[type, ...]:
    classes = {
        value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == ENGINE
        for value in list(vars(module).values())
        if isinstance(value, type) and _is_named(value)
    }
    return tuple(sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)))


def signatures() -> dict[str, dict[str, object]]:
    """Return the content of the file, by symbol."""
    rows: dict[str, dict[str, object]] = {}
    for path, found in scan().items():
        row: dict[str, object] = {
            "use": found.use,
            "signature": upstream.signature_of(path),
            "files": sorted(found.files),
        }
        if found.reason:
            row |= {"reason": found.reason, "until": found.until}
        rows[path] = row
    return rows


def write(file: Path) -> None:
    """Write one symbol a line."""
    rows = signatures()
    lines = [f" {json.dumps(path)}: {json.dumps(row)}" for path, row in rows.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"wrote {len(rows)} symbols of vLLM {upstream.installed_version()}")


if __name__ == "__main__":
    write(upstream.SIGNATURES)
