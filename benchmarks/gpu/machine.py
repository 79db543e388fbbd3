"""What the machine at hand is, and the environment of experiments on it.

python benchmarks/gpu/machine.py
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
    """Versions and the GPU. Imports torch and starts CUDA: only in a process of its own."""
    import torch

    driver = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    facts: dict[str, Any] = {
        "gpu": None,
        "python": platform.python_version(),
        "driver": driver and driver.splitlines()[0],
        "vllm": _version("vllm"),
        # vLLM has its own copy of FlashAttention-4, which needs this package.
        "cute_dsl": _version("nvidia-cutlass-dsl"),
        "torch": torch.__version__,
        "triton": _version("triton"),
    }
    if not torch.cuda.is_available():
        return facts
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
    }


def described(environment: dict[str, str]) -> dict[str, Any]:
    """As :func:`describe`, from a process with this environment.

    Raises:
        ValueError: If it lacks what experiments need.
    """
    printed = subprocess.run(
        [sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    facts: dict[str, Any] = json.loads(printed.splitlines()[-1])
    if facts["vllm"] is None:
        raise ValueError(
            f"vLLM is not installed for {sys.executable}, and every experiment needs it."
        )
    if facts["gpu"] is None:
        driver = f"driver {facts['driver']}" if facts["driver"] else "no NVIDIA driver answers"
        raise ValueError(f"torch {facts['torch']} finds no GPU that it can use ({driver}).")
    return facts


def environment(scratch: Path) -> dict[str, str]:
    """Environment variables of experiments, in the checkout that this file is of.

    Args:
        scratch: A folder that outlives the experiments.
    """
    paths = [str(ROOT), str(ROOT / "benchmarks")]
    if _version("vllm-diffusion") is None:
        paths.append(str(_entry_points(scratch)))
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *inherited]),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def commit() -> str | None:
    """Of the checkout; ``None`` where it has no history beside it, or files that were changed
    since.
    """
    found = _printed("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _printed("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return None if changed else found


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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _printed(*command: str) -> str | None:
    """What a program prints; ``None`` if it is missing, fails or prints nothing."""
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return printed.stdout.strip() or None


if __name__ == "__main__":
    print(json.dumps(describe()))
