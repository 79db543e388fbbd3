"""Record of the GPUs on which ``vllm-diffusion doctor --gpu`` found everything right, in vLLM's
cache directory.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from vllm_diffusion.startup import machine

logger = logging.getLogger("vllm.vllm_diffusion")

# Packages whose change makes a record stale.
PACKAGES = ("torch", "triton", "vllm", "vllm-diffusion")
COMMAND = "vllm-diffusion doctor --gpu"


def gpu_name(device: int) -> str:
    """Return a GPU's name, with its compute capability, without a context on it.

    Args:
        device: vLLM's index of the GPU.
    """
    from vllm.platforms import current_platform

    name = current_platform.get_device_name(device)
    capability = current_platform.get_device_capability(device)
    return (
        name if capability is None else f"{name} (compute capability {capability.as_version_str()})"
    )


def facts_of(gpu: str) -> dict[str, str]:
    """Return what a record holds for: the GPU, its driver and versions.

    Args:
        gpu: See :func:`gpu_name`.
    """
    driver = machine.nvidia_driver().driver_version or "unknown"
    return {"gpu": gpu, "driver": driver, **{name: version(name) for name in PACKAGES}}


def record_path(facts: Mapping[str, str]) -> Path:
    """Return the file of a record; it exists if everything was right.

    Args:
        facts: See :func:`facts_of`.
    """
    from vllm import envs

    name = re.sub(r"\W+", "-", facts["gpu"]).strip("-")
    build = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:8]
    return Path(envs.VLLM_CACHE_ROOT) / "vllm_diffusion" / f"doctor-{name}-{build}.json"


def write_record(facts: Mapping[str, str], is_right: bool) -> str:
    """Write the record of a GPU on which everything is right, and delete that of any other.

    Returns:
        Why it could not be written; empty if it was.
    """
    path = record_path(facts)
    try:
        if is_right:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(dict(facts), indent=1) + "\n", encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return (
            f"{path} cannot be written ({error.strerror}), so each start names this command; set "
            "VLLM_CACHE_ROOT to a folder that can be."
        )
    return ""


def log_unrecorded(device: int) -> None:
    """Log one line with the command if this GPU has no record.

    Args:
        device: vLLM's index of the GPU.
    """
    facts = facts_of(gpu_name(device))
    if not record_path(facts).exists():
        logger.warning(
            "This GPU has not been checked (%s, driver %s, torch %s); run once, with the GPU free: %s",
            facts["gpu"],
            facts["driver"],
            facts["torch"],
            COMMAND,
        )
