"""Where Python may not write bytecode beside the sources, it is written once, elsewhere.

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
    """Have this process, and those that it starts, keep bytecode in the user's cache folder.

    Only where Python was told not to keep any and the environment was installed without it. A folder
    that ``PYTHONPYCACHEPREFIX`` names is used instead of ours; where nothing can be written nothing
    changes. Modules that are imported already are not written any more: call this first.
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
    """Whether the environment's largest packages have bytecode where Python looks for it."""
    specs = [PathFinder.find_spec(name) for name in _LARGEST_PACKAGES]
    sources = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return all(Path(cache_from_source(source)).exists() for source in sources)


def cache_folder() -> Path:
    """Where this user's programs keep what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
