"""Download what an offline GPU host lacks, and cut it into parts that can be carried there one at a
time.

    python benchmarks/gpu/stage_host.py --out parts
    sh benchmarks/gpu/install_host.sh parts site      # on the host

Staged are wheels for the host's Python: vLLM, FlashAttention-4's parts, Humming, and
``lm-format-enforcer``, without which a server refuses grammars. The host keeps its own PyTorch and
Triton. What serving a text model on one architecture never loads is left out (``DROPPED``). A
checksum goes with each part.
"""

import argparse
import fnmatch
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# What vLLM imports to start and to serve, beside PyTorch, Triton, Transformers and NumPy.
VLLM = """
vllm annotated-types apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors depyf dill distro fastapi
jiter jmespath llguidance loguru model-hosting-container-standards msgspec openai openai-harmony partial-json-parser
prometheus-fastapi-instrumentator pybase64 pydantic pydantic-core python-multipart pyzmq setproctitle sniffio starlette
typing-inspection uvicorn watchfiles xgrammar httpx2 httpcore2 orjson
"""
FLASH_ATTENTION_4 = """
nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu13
quack-kernels torch-c-dlpack-ext cuda-python
"""
HUMMING = "humming-kernels tabulate"
GRAMMARS = (
    "lm-format-enforcer interegular jsonschema jsonschema-specifications referencing rpds-py attrs"
)
# Folders and libraries of other architectures and of other ways to serve. One of FlashAttention-2
# and -3 has to stay.
DROPPED = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*.so",
    "vllm/vllm-rs*",
    "vllm/_qutlass_C*.so",
    "vllm/_flashmla*_C*.so",
    "vllm/_flashkda_C*.so",
    "vllm/_deepselect_C*.so",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/flashmla/*",
    "*.pyi",
    "*/__pycache__/*",
)
MIB = 2**20
PART_MIB = 60


def download(requirements: Sequence[str], python: str, folder: Path) -> None:
    """Fetch the wheel of each requirement for Linux on x86-64, without what it depends on."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for minor in (39, 38, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5):
        command += ["--platform", f"manylinux_2_{minor}_x86_64"]
    for name in ("manylinux2014_x86_64", "manylinux2010_x86_64", "linux_x86_64"):
        command += ["--platform", name]
    subprocess.run([*command, *requirements], check=True)


def as_here(names: Iterable[str]) -> list[str]:
    """Return requirements of the versions that are installed here, which were tested together; the
    newest of others.
    """
    found = []
    for name in names:
        try:
            # Without the local part, of a build for another CUDA.
            found.append(f"{name}=={version(name).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(name)
    return found


def unpack(wheels: Iterable[Path], tree: Path) -> None:
    """Unpack wheels into one folder for ``PYTHONPATH``, without what is dropped."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not any(fnmatch.fnmatch(name, pattern) for pattern in DROPPED):
                    archive.extract(name, tree)
    for data in list(tree.glob("*.data")):
        for kind in ("purelib", "platlib"):
            if (data / kind).is_dir():
                shutil.copytree(data / kind, tree, dirs_exist_ok=True)
        shutil.rmtree(data)


def pack(tree: Path, folder: Path, limit: int) -> None:
    """Write a folder as one compressed archive in parts, with their checksums.

    Args:
        tree: What is packed.
        folder: For the parts; those of an earlier run are removed.
        limit: Bytes of a part, at the most.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*"):
        old.unlink()
    files = [path for path in tree.rglob("*") if path.is_file()]
    sums = []
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w:xz") as archive:
            # Files that are alike lie side by side, which compresses better.
            for path in sorted(files, key=lambda path: (path.suffix, str(path))):
                archive.add(path, path.relative_to(tree))
        whole.seek(0)
        for i, part in enumerate(iter(partial(whole.read, limit), b"")):
            name = f"part-{i:02}"
            (folder / name).write_bytes(part)
            sums.append(f"{hashlib.sha256(part).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the parts")
    parser.add_argument("--python", default="3.12", help="of the host (%(default)s)")
    parser.add_argument("--only", nargs="+", help="these requirements in place of all")
    options = parser.parse_args()
    names = " ".join((VLLM, FLASH_ATTENTION_4, HUMMING, GRAMMARS)).split()
    asked = options.only or as_here(names)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, tree = Path(scratch) / "wheels", Path(scratch) / "tree"
        download(asked, options.python, wheels)
        unpack(sorted(wheels.glob("*.whl")), tree)
        pack(tree, options.out, PART_MIB * MIB)
    shutil.copy(Path(__file__).with_name("install_host.sh"), options.out)
    for path in sorted(options.out.glob("part-*")):
        print(f"{path}  {path.stat().st_size / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
