"""Bytecode cache in the user's folder if Python may not write it beside the sources.

vLLM and what it imports are some four thousand modules. Container images set
``PYTHONDONTWRITEBYTECODE``, and an environment that was installed without compiling then compiles them
anew in every process of every start.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path

_LARGEST_PACKAGES = ("torch", "vllm")


def compile_once() -> None:
    """Keep the bytecode of this process and its children in the user's cache folder.

    This applies only if Python is set not to write bytecode and the environment was installed
    without it. A folder that ``PYTHONPYCACHEPREFIX`` names is used instead of ours; if it cannot be
    written, nothing changes. Modules that are already imported are not cached: call this first.
    """
    if not sys.dont_write_bytecode or is_compiled():
        return
    folder = Path(sys.pycache_prefix or cache_folder() / "vllm-diffusion" / "bytecode")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


def is_compiled() -> bool:
    """Return true if the environment's largest packages have bytecode where Python looks for it."""
    specs = [PathFinder.find_spec(name) for name in _LARGEST_PACKAGES]
    sources = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return all(Path(cache_from_source(source)).exists() for source in sources)


def cache_folder() -> Path:
    """Return the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
