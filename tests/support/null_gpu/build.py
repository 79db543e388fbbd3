"""Compilation of the null GPU's libraries, once for each state of their sources."""

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"])
_HEADERS = SITE / "nvidia" / "cu13" / "include"
_COMPILER = ("g++", "-std=c++17", "-O1", "-fPIC", "-Wno-unused-result", f"-I{_HEADERS}")
# Libraries whose calls of CUDA the null GPU has to answer.
_CALLERS = ("torch/lib/lib*.so", "vllm/*.so", "vllm/vllm_flash_attn/*.so", "nvidia/nccl/lib/*.so*")
_NOT_SUPPORTED = 801  # cudaErrorNotSupported


@dataclass(frozen=True)
class Library:
    """One shared library.

    Attributes:
        name: Its file name.
        sources: What it is compiled from.
        symbols: Pattern of what else it is asked for, answered by an error; functions that callers
            only look up may be called without one.
        error: What such a function returns.
        versioned: Whether its symbols carry its name as their version, as NVIDIA's do.
        flags: Of the compiler.
    """

    name: str
    sources: tuple[str, ...]
    symbols: str = ""
    error: int = _NOT_SUPPORTED
    versioned: bool = False
    flags: tuple[str, ...] = ()


_RUNTIME = Library(
    "libcudart.so.13",
    ("device.cpp", "memory.cpp", "streams.cpp", "launches.cpp"),
    r"_*cuda[A-Z_]\w*",
    versioned=True,
)
_OTHERS = (
    Library(
        "libcuda.so.1", ("driver.cpp",), r"cu(?!File|blas|da|dnn|fft|sparse|solver|rand)[A-Z]\w*"
    ),
    Library(
        "libcublas.so.13",
        ("products.cpp",),
        r"cublas(?!Lt)[A-Z]\w*",
        error=0,
        versioned=True,
        flags=("-DCUBLAS",),
    ),
    Library(
        "libcublasLt.so.13",
        ("products.cpp",),
        r"cublasLt[A-Z]\w*",
        error=0,
        versioned=True,
        flags=("-DCUBLASLT",),
    ),
    Library("libnvidia-ml.so.1", ("nvml.cpp",)),
)
LIBRARIES = (_RUNTIME, *_OTHERS)
# Those that the process must load first, instead of the ones that come with torch.
PRELOADED = tuple(library.name for library in LIBRARIES if library.versioned)


def missing() -> str | None:
    """Return what this machine lacks to build them, or ``None``."""
    if shutil.which("g++") is None or shutil.which("nm") is None:
        return "g++ and binutils are not installed, which compile the null GPU"
    if not (_HEADERS / "cuda_runtime_api.h").is_file():
        return f"CUDA's headers are not in {_HEADERS}"
    return None


def build() -> Path:
    """Return the folder of the libraries, compiled unless these sources have been before.

    It lies in the user's cache, keyed by the sources and the versions of what calls them.
    """
    folder = _cache() / _key()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            # Complete or not there at all.
            scratch = Path(tempfile.mkdtemp(dir=folder.parent))
            _compile(scratch)
            scratch.rename(folder)
    return folder


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vllm-diffusion-null-gpu"


def _key() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cpp")) + [SOURCES / "gpu.h", Path(__file__)]:
        digest.update(path.read_bytes())
    for package in ("torch", "vllm", "nvidia-cuda-runtime"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()[:16]


def _compile(folder: Path) -> None:
    called = _undefined_symbols(path for pattern in _CALLERS for path in SITE.glob(pattern))
    # Triton and torch look the driver's functions up by name: all that its header declares.
    preprocessed = _run("g++", "-E", f"-I{_HEADERS}", str(_HEADERS / "cuda.h"))
    called |= set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", preprocessed))
    # So does vLLM, with all that its own wrapper of the runtime names.
    called.add("cudaDeviceReset")
    _link(_RUNTIME, folder, called, [])
    for library in _OTHERS:
        _link(library, folder, called, [str(folder / _RUNTIME.name)])
    # What torch's inductor links its launchers with.
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def _link(library: Library, folder: Path, called: set[str], linked: list[str]) -> None:
    """Compile a library, with functions that report an error for what it does not have."""
    objects = []
    for source in library.sources:
        objects.append(str(folder / f"{library.name}.{source}.o"))
        _run(*_COMPILER, *library.flags, "-c", str(SOURCES / source), "-o", objects[-1])
    defined = set(re.findall(r" T (\w+)", _run("nm", "--defined-only", *objects)))
    lacking = folder / f"{library.name}.lacking.cpp"
    lines = ['extern "C" void null_gpu_missing(const char*);']
    lines += [
        f'extern "C" int {name}() {{ null_gpu_missing("{name}"); return {library.error}; }}'
        for name in sorted(called - defined)
        if library.symbols and re.fullmatch(library.symbols, name)
    ]
    lacking.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["-shared", f"-Wl,-soname,{library.name}", "-ldl", "-lpthread"]
    if library.versioned:
        versions = folder / f"{library.name}.versions"
        versions.write_text(f"{library.name} {{ global: *; }};\n", encoding="utf-8")
        options.append(f"-Wl,--version-script={versions}")
    _run(*_COMPILER, *objects, str(lacking), *linked, *options, "-o", str(folder / library.name))
    for leftover in folder.glob(f"{library.name}.*"):
        leftover.unlink()


def _undefined_symbols(libraries: Iterable[Path]) -> set[str]:
    printed = _run("nm", "-D", "--undefined-only", *map(str, libraries))
    return {line.split()[-1].split("@")[0] for line in printed.splitlines() if " U " in line}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... failed:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    print(build())
