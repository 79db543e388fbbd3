"""This machine: its accelerator, and the memory of one without. No CUDA context is created."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import CacheConfig, ModelConfig, VllmConfig


@dataclass(frozen=True)
class NvidiaDriver:
    """Report of NVML about the installed NVIDIA driver.

    Attributes:
        num_devices: GPUs that the driver sees.
        driver_version: For example ``"580.65.06"``; ``None`` when NVML does not start.
        cuda_version: Highest CUDA version that the driver runs, as ``(major, minor)``.
        problem: Why NVML did not start; ``None`` when it did.
    """

    num_devices: int
    driver_version: str | None
    cuda_version: tuple[int, int] | None
    problem: str | None


def is_vllm_cpu_build() -> bool:
    """Return true if the installed vLLM was compiled for CPUs, under whichever distribution
    name.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            if "cpu" in version(name) or name == "vllm-cpu":
                return True
        except PackageNotFoundError:
            continue
    return False


@functools.cache
def nvidia_driver() -> NvidiaDriver:
    """Ask NVML for the driver's version and the CUDA version it can run."""
    try:
        from vllm.utils.import_utils import import_pynvml

        nvml = import_pynvml()
        nvml.nvmlInit()
        try:
            driver_version = nvml.nvmlSystemGetDriverVersion()
            packed = nvml.nvmlSystemGetCudaDriverVersion()
            num_devices = nvml.nvmlDeviceGetCount()
        finally:
            nvml.nvmlShutdown()
    except Exception as error:
        return NvidiaDriver(0, None, None, str(error) or type(error).__name__)
    return NvidiaDriver(num_devices, driver_version, (packed // 1000, packed % 1000 // 10), None)


def nvidia_problem() -> str | None:
    """Return why a present NVIDIA GPU cannot be used; ``None`` if it can or there is none.

    A driver runs every CUDA release of its own major version and of the ones before, so the test
    is on the major version.
    """
    # The second one is WSL's.
    node = next((node for node in ("/dev/nvidia0", "/dev/dxg") if Path(node).exists()), None)
    driver = nvidia_driver()
    if node is None and driver.num_devices == 0:
        return None
    import torch

    if torch.version.cuda is None:
        return f"an NVIDIA device ({node}) is present, but this torch was built without CUDA"
    major, minor = torch.version.cuda.split(".")[:2]
    if driver.num_devices == 0:
        if node == "/dev/dxg" and not Path("/usr/lib/wsl/lib/libcuda.so.1").exists():
            # WSL always has /dev/dxg; without NVIDIA's library the Windows side has no NVIDIA GPU.
            return None
        reason = driver.problem or "it reports no device"
        return (
            f"an NVIDIA device ({node}) is present, but its driver does not start: {reason}. "
            f"A driver that runs CUDA {major}.{minor} is needed"
        )
    assert driver.cuda_version is not None
    if driver.cuda_version[0] < int(major):
        have = f"{driver.cuda_version[0]}.{driver.cuda_version[1]}"
        return (
            f"the NVIDIA driver {driver.driver_version} runs CUDA up to {have}, but this torch "
            f"needs CUDA {major}.{minor}"
        )
    return None


def nvidia_lack() -> str | None:
    """Return why no NVIDIA GPU can be used on this machine; ``None`` where one can."""
    return nvidia_problem() or (None if nvidia_driver().num_devices else "this machine has none")


@functools.cache
def working_accelerator() -> str | None:
    """Return the name of the vLLM platform, in or out of tree, that finds an accelerator here."""
    if nvidia_lack() is None:
        return "cuda"
    from vllm.platforms import builtin_platform_plugins

    for name in ("tpu", "rocm", "xpu"):
        if _finds_device(builtin_platform_plugins[name]):
            return name
    allowed = os.environ.get("VLLM_PLUGINS")
    for plugin in entry_points(group="vllm.platform_plugins"):
        is_allowed = allowed is None or plugin.name in allowed.split(",")
        if plugin.name == "vllm_diffusion_cpu" or not is_allowed:
            continue
        if _finds_device(functools.partial(lambda entry: entry.load()(), plugin)):
            return plugin.name
    return None


def _finds_device(probe: Callable[[], object]) -> bool:
    try:
        return probe() is not None
    except Exception:
        # A probe that fails has found no device; vLLM itself treats it so, and reports a plugin
        # that cannot be imported.
        return False


# Bytes beyond the weights, for Python, torch and the engine's processes.
RESERVED_BYTES = 1024**3
# KV cache when neither --kv-cache-memory-bytes nor VLLM_CPU_KVCACHE_SPACE is set. vLLM's
# default, 92 % of the machine's memory, suits a machine that does nothing else.
DEFAULT_KV_CACHE_BYTES = 512 * 1024**2


def has_cpp_compiler() -> bool:
    """Return true if ``torch.compile`` can build CPU code here: it needs a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    return shutil.which(compiler) is not None or shutil.which("clang++") is not None


def checkpoint_bytes(model: str) -> int:
    """Return the bytes of a local checkpoint's weights in safetensors files; 0 if it is not local
    yet.
    """
    directory = Path(model)
    if not directory.is_dir():
        return 0
    # It imports torch, for which a command that answers at once does not wait.
    from vllm_diffusion.weights.weight_files import weight_files

    return sum(path.stat().st_size for path in weight_files(directory) if path.is_file())


def check_checkpoint_fits(model_config: ModelConfig) -> None:
    """Compare the checkpoint's size with the memory available now.

    Raises:
        ValueError: If the weights need more bytes than are available.
    """
    import psutil

    available = psutil.virtual_memory().available
    needed = checkpoint_bytes(model_config.model)
    if needed + RESERVED_BYTES > available:
        raise ValueError(
            f"The checkpoint {model_config.model} holds {needed / 2**30:.1f} GiB of weights, but "
            f"only {available / 2**30:.1f} GiB of memory are available. Free memory, or serve it "
            "on a machine with a GPU."
        )


def kv_cache_bytes(cache_config: CacheConfig) -> int:
    """Bytes of the KV cache on one rank."""
    kv_cache_space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if kv_cache_space:
        return int(kv_cache_space) * 1024**3
    chosen: int | None = cache_config.kv_cache_memory_bytes
    return DEFAULT_KV_CACHE_BYTES if chosen is None else chosen


def check_shared_memory() -> None:
    """Refuse to start where no lock between processes can be made, which vLLM's engine makes first.

    Raises:
        ValueError: Naming the folder.
    """
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as error:
        raise ValueError(
            f"no lock between processes can be made in /dev/shm ({error.strerror or error}), and vLLM's engine needs "
            "one; mount a tmpfs there that can be written, as docker run --shm-size 1g does."
        ) from None


def compile_backend(vllm_config: VllmConfig) -> str | None:
    """Return the backend of ``torch.compile`` for the decision step, ``None`` to run it eagerly.

    It runs eagerly if the operator asks for it, and on a CPU without a C++ compiler.
    """
    from vllm.platforms import current_platform

    if vllm_config.model_config.enforce_eager:
        return None
    if current_platform.is_cpu():
        return "inductor" if has_cpp_compiler() else None
    return str(current_platform.simple_compile_backend)


def launch_backend(vllm_config: VllmConfig) -> str | None:
    """Return the backend for the small functions around a step, ``None`` on a CPU.

    Each computes a few numbers per request or row; compiled, it takes a GPU one launch instead of
    twenty. A CPU has no launches, and would compile for seconds what it runs in microseconds.
    """
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else compile_backend(vllm_config)
