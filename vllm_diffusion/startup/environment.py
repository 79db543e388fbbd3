"""Environment variables: the package's own, which only this module reads, three of vLLM's, and
Python's cache.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path

# Limit for answers to one prompt if the operator sets none. vLLM's 16,384 would keep a server busy
# with one request for minutes; OpenAI's own limit is 128.
MOST_ANSWERS = 128
_LIMIT = "VLLM_MAX_N_SEQUENCES"


def is_disabled() -> bool:
    """Return true with ``VLLM_DIFFUSION_DISABLE=1``: both entry points do nothing; stock vLLM
    serves.
    """
    return os.environ.get("VLLM_DIFFUSION_DISABLE") == "1"


def forces_cpu() -> bool:
    """Return true with ``VLLM_DIFFUSION_CPU=1``: the CPU is used even where there is a GPU."""
    return os.environ.get("VLLM_DIFFUSION_CPU") == "1"


def await_engine_at_shutdown() -> None:
    """Set vLLM's shutdown timeout, so that a server waits until its engine has ended open requests.

    Otherwise vLLM's server kills the engine at once: requests that the engine has not ended by then
    wait until their clients give up, and so does the server. vLLM waits only if the variable is
    set; its default of 5 s is set here, and an operator's own value stays.
    """
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "5")


def limit_answers() -> int | None:
    """Lower vLLM's limit of ``n`` for this process and its children, unless it is set.

    Returns:
        The new limit; ``None`` where one was set before.
    """
    if _LIMIT in os.environ:
        return None
    os.environ[_LIMIT] = str(MOST_ANSWERS)
    return MOST_ANSWERS


def limit_pictures() -> None:
    """Lower vLLM's limit of a picture's pixels for this process and its children, unless it is set.

    A picture of 144 million pixels is a file of 140 KB, and takes 2.6 GB while it is decoded.
    """
    os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", "50000000")


_LARGEST_PACKAGES = ("torch", "vllm")


def compile_once() -> None:
    """Keep the bytecode of this process and its children in the user's cache folder.

    vLLM and what it imports are some four thousand modules. Container images set
    ``PYTHONDONTWRITEBYTECODE``, and an environment that was installed without compiling then
    compiles them anew in every process of every start.

    This applies only if Python is set not to write bytecode and the environment was installed
    without it. A folder that ``PYTHONPYCACHEPREFIX`` names is used instead of ours; if it cannot be
    written, or the user has no cache folder, nothing changes. Modules that are already imported are
    not cached: call this first.
    """
    if not sys.dont_write_bytecode or is_compiled():
        return
    cache = cache_folder()
    if sys.pycache_prefix is not None:
        folder = Path(sys.pycache_prefix)
    elif cache is not None:
        folder = cache / "vllm-diffusion" / "bytecode"
    else:
        return
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


def cache_folder() -> Path | None:
    """Return the user's cache folder; ``None`` for a user without a home, as containers may have
    it.

    A user that is only a number, and no ``HOME``, is how OpenShift runs a container.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    home = os.path.expanduser("~")
    return None if home == "~" else Path(home) / ".cache"
