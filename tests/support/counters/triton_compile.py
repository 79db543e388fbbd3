"""Compiles a Triton launch for a chip that is not there, and reads the assembler's report."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# Shared memory that one program can have, in bytes.
SHARED_MEMORY = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
# What is reported of a kernel that has a baseline.
COMPILED = ("registers", "spilled_bytes", "shared_memory")
# How a tensor's type is called in a kernel's signature.
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Record launches instead of making them: kernels with their arguments by place and name."""
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def launcher(kernel: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: launches.append((kernel, args, kwargs))

    with mock.patch.object(JITFunction, "__getitem__", launcher):
        yield launches


def compile_for(
    chip: str,
    kernel: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loops: bool = False,
) -> dict[str, Any]:
    """Compile one launch for a chip, and return what Triton and the assembler report.

    With ``loops`` its innermost loops too, which takes as long as to compile it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {
        name: kwargs[name] for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs
    }
    values = dict(zip(kernel.arg_names, args, strict=False))
    values.update({name: value for name, value in kwargs.items() if name not in options})
    for param in kernel.params:
        values.setdefault(param.name, param.default)
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def describe(value: Any, path: tuple[int, ...], param: Any) -> Any:
        """Return a value's type; properties that the compiler knows go by its path."""
        special = not param.do_not_specialize
        if isinstance(value, tuple):
            types = [describe(item, (*path, i), param) for i, item in enumerate(value)]
            # A named tuple keeps its names.
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
        if param.is_constexpr or value is None or (type(value) is int and value == 1 and special):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if special and value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32"

    for param in kernel.params:
        signature[param.name] = describe(values[param.name], (param.num,), param)
    architecture = int(chip.removeprefix("sm_"))
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options=options,
    )
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if architecture >= 100:
        assembler = assembler.with_name("ptxas-blackwell")
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        target = re.search(r"\.target (\w+)", ptx).group(1)
        report = subprocess.run(
            [assembler, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    # Stack is not spills: a kernel may use some for other reasons.
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()
    found = {
        "kernel": kernel.__name__,
        "registers": int(re.search(r"Used (\d+) registers", report).group(1)),
        "spilled_bytes": int(stores) + int(loads),
        "shared_memory": compiled.metadata.shared,
        "num_warps": compiled.metadata.num_warps,
    }
    return found | {"loops": innermost_loops(compiled.asm["cubin"])} if loops else found


def run_uninterpreted(path: str, *arguments: str, **variables: str) -> list[Any]:
    """Run a test's file as a program without Triton's interpreter, and return its lines of JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, path, *arguments]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def told_of(tool: str, option: str, *, cubin: bytes) -> str:
    """Return what a tool inside Triton's package prints of a compiled kernel."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [path, option, file.name], capture_output=True, text=True, check=True
        ).stdout


def innermost_loops(cubin: bytes) -> list[dict[str, int]]:
    """Return for each innermost loop its instructions, and those for tensor cores.

    An instruction here is one of the machine's, whatever the program was written in; a loop is what
    lies between a label and a branch back to it. ``least`` are those of the shortest way through
    it, by the branches forward.
    """
    text = told_of("nvdisasm", "-c", cubin=cubin)
    labels: dict[str, int] = {}
    names: list[str] = []
    # Of instructions that branch: where to, and whether always; with a suffix they ask something
    # first.
    branches: dict[int, tuple[str, bool]] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(names)
            continue
        found = re.match(
            r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)(\.(?:U|DIV|CONV)\s)?", line
        )
        if found is None:
            continue
        if found.group(2) == "BRA" and (target := re.search(r"`\((\.L_x_\d+)\)", line)):
            branches[len(names)] = target.group(1), not (found.group(1) or found.group(3))
        names.append(found.group(2))
    # The last branch of a program jumps to itself, so that nothing after it runs.
    loops = [
        (labels[target], at + 1)
        for at, (target, _) in branches.items()
        if labels[target] <= at < len(names) and labels[target] < at
    ]
    inner = [
        (a, b)
        for a, b in loops
        if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)
    ]

    def least(first: int, end: int) -> int:
        steps = {first: 0}
        for at in range(first, end):
            if at not in steps:
                continue
            target, always = branches.get(at, ("", False))
            # The last one branches back, or goes on.
            following = [] if always and at < end - 1 else [at + 1]
            if at < labels.get(target, -1) <= end:
                following.append(labels[target])
            for then in following:
                steps[then] = min(steps.get(then, end), steps[at] + 1)
        return steps.get(end, end - first)

    return [
        {
            "instructions": b - a,
            "least": least(a, b),
            "tensor": sum("MMA" in name for name in names[a:b]),
        }
        for a, b in inner
    ]


def variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what Triton specializes a launch on, as its own launcher computes it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialization, options = bind(*args, **kwargs)
    return f"{specialization} {sorted(options.items())}"
