"""Outcomes of earlier checks on this GPU, as JSON in vLLM's cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import attention_kernels
from vllm_diffusion.kernel_choice.process import Outcome
from vllm_diffusion.startup import machine

# Packages and folders whose change makes an outcome stale.
PACKAGES = ("torch", "triton", "vllm", "vllm-diffusion")
FOLDERS = ("attention", "canvas", "sampling", "decoding", "kernel_choice")
# A server waits as long for another one that checks the same GPU.
LOCK_SECONDS = 90.0


def facts_of(gpu: str) -> dict[str, str]:
    """Return what outcomes hold for: the GPU, its driver, versions and the kernels' sources.

    Args:
        gpu: Name of the GPU, with its compute capability.
    """
    versions = {name: version(name) for name in PACKAGES}
    driver = machine.nvidia_driver().driver_version or "unknown"
    return {"gpu": gpu, "driver": driver, **versions, "kernels": _hash_of_sources()}


def _hash_of_sources() -> str:
    ours = Path(__file__).resolve().parents[1]
    roots = [Path(next(iter(attention_kernels.__path__))), *(ours / name for name in FOLDERS)]
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Record:
    """Outcomes by :attr:`KernelCase.key`, in a file for each kind of GPU and each build.

    Attributes:
        path: The file.
        problem: Why nothing could be read from it or remembered in it; empty if all is well.
    """

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        """Name the file.

        Args:
            folder: vLLM's cache directory.
            facts: See :func:`facts_of`.
        """
        name = re.sub(r"\W+", "-", facts["gpu"]).strip("-")
        build = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:8]
        self.path = folder / "vllm_diffusion" / f"self-check-{name}-{build}.json"
        self.problem = ""
        self._facts = dict(facts)

    def read(self) -> dict[str, Outcome]:
        """Return outcomes of earlier starts; :attr:`problem` states why they cannot be read."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            outcomes = {key: Outcome(**outcome) for key, outcome in content["cases"].items()}
            if {each.state for each in outcomes.values()} - {"right", "refused"}:
                raise ValueError("a state that does not exist")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.problem = (
                f"{self.path} is damaged ({type(error).__name__}), so the kernels were checked anew"
            )
            return {}
        return outcomes

    def write(self, outcomes: Mapping[str, Outcome]) -> None:
        """Remember outcomes; :attr:`problem` states why they cannot be remembered."""
        cases = {key: outcome.to_json() for key, outcome in outcomes.items()}
        content: dict[str, Any] = {"facts": self._facts, "cases": cases}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Complete or not there at all.
            handle, scratch = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            Path(scratch).replace(self.path)
        except OSError as error:
            self.problem = _unwritable(self.path, error)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for another process that checks the same kind of GPU, and keep others waiting."""
        with contextlib.ExitStack() as held:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(self.path.with_suffix(".lock"), timeout=LOCK_SECONDS))
            except Timeout:
                pass  # its holder may hang
            except OSError as error:
                self.problem = _unwritable(self.path, error)
            yield


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"{path.parent} cannot be written ({error.strerror}), so that every start checks the kernels; set "
        "VLLM_CACHE_ROOT to a folder that can be"
    )
