"""What the machine at hand is, and the environment of experiments on it.

python benchmarks/gpu/machine.py
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Stands in for the names of vLLM that the sampler imports, where vLLM itself is not installed.
STUB = HERE / "stub"
# What a result depends on: those of another state of these are never shown beside it.
SOURCES = ("attention_kernels", "vllm_diffusion", "benchmarks")


def describe() -> dict[str, Any]:
    """Versions and the GPU. Imports torch and starts CUDA: only in a process of its own."""
    facts: dict[str, Any] = {
        "gpu": None,
        "python": platform.python_version(),
        "driver": _driver(),
        "vllm": _version("vllm"),
        "fa4": _version("flash-attn-4"),
    }
    import torch

    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": _version("triton")}
    try:
        torch.empty(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        facts["why_no_gpu"] = str(error).splitlines()[0].partition(". ")[0]
        return facts
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
    }


def _version(package: str) -> str | None:
    """Of a package that is installed; the stub is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return printed.stdout.partition("\n")[0].strip() or None


def described(environment: dict[str, str]) -> dict[str, Any]:
    """As :func:`describe`, from a process with this environment.

    Raises:
        RuntimeError: If not even that runs.
    """
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{sys.executable} cannot describe this machine: {last}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def environment(facts: dict[str, Any] | None, toy: bool, scratch: Path) -> dict[str, str]:
    """Environment variables of experiments, in the checkout that this file is of.

    Args:
        facts: What :func:`describe` returned; ``None`` before they are known.
        toy: On the CPU, whatever else is there.
        scratch: A folder that outlives the experiments.
    """
    paths = [str(ROOT), str(ROOT / "benchmarks")]
    if facts is not None and facts["vllm"] is None:
        paths.append(str(STUB))
    elif _version("vllm-diffusion") is None:
        paths.append(str(_entry_points(scratch)))
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *inherited]),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if toy:
        found |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return found


def _entry_points(scratch: Path) -> Path:
    """A folder that makes vLLM find this package's plugins in a checkout that nobody installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = scratch / "entry_points"
    info = folder / f"vllm_diffusion-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    return folder


def commit() -> str | None:
    """Of the checkout; ``None`` where there is no history beside it."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def sources() -> str:
    """A digest of every file that a result depends on, committed or not."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            kept = path.suffix in (".py", ".toml") or (
                path.suffix == ".json" and "results" not in path.parts
            )
            if kept and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(json.dumps(describe()))
