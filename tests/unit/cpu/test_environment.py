"""Tests of the environment that a CPU server sets before vLLM is imported, and of how its processes
begin.
"""

import os
import sys
from types import ModuleType

import pytest

from tests.support.engines.commands import run
from vllm_diffusion import cpu
from vllm_diffusion.startup import environment, machine

# The engine's import of what it quantises with, and the processes that it leaves running.
CODE = """
import psutil
from vllm.platforms import current_platform
assert current_platform.is_cpu()
import humming.ops.utils, humming.utils.nvrtc
names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
print([name for name in names if "humming" in name])
"""


@pytest.mark.engine
@pytest.mark.slow
def test_no_background_builds() -> None:
    """Importing vLLM's quantization starts no process that imports torch again."""
    assert run(sys.executable, "-c", CODE, timeout=300).stdout.splitlines()[-1] == "[]"


METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
COMMAND = "vllm.entrypoints.cli.main"


@pytest.mark.parametrize(
    ("accelerator", "is_command", "own", "expected"),
    [
        (None, True, None, "fork"),
        (None, True, "spawn", "spawn"),
        ("cuda", True, None, None),
        (None, False, None, None),
    ],
    ids=["a command", "the user's value", "an accelerator", "a script"],
)
def test_processes_are_forked(
    accelerator: str | None,
    is_command: bool,
    own: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commands fork where no accelerator works, unless the user has set another way, and keep the
    bytecode of what they import from then on.
    """
    kept: list[None] = []
    monkeypatch.setattr(environment, "compile_once", lambda: kept.append(None))
    # Their values are restored after the test, whatever the plugin sets.
    for name in (METHOD, "CUDA_VISIBLE_DEVICES", "HUMMING_DISABLE_PARALLEL_BUILD"):
        monkeypatch.setenv(name, "")
    if own is None:
        monkeypatch.delenv(METHOD)
    else:
        monkeypatch.setenv(METHOD, own)
    for name in ("VLLM_DIFFUSION_CPU", "VLLM_DIFFUSION_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "working_accelerator", lambda: accelerator)
    monkeypatch.setattr(machine, "is_vllm_cpu_build", lambda: False)
    monkeypatch.setattr(cpu, "_interpret_triton", lambda: None)
    monkeypatch.delitem(sys.modules, COMMAND, raising=False)
    if is_command:
        monkeypatch.setitem(sys.modules, COMMAND, ModuleType(COMMAND))

    assert (cpu.cpu_platform_plugin() is None) == (accelerator is not None)
    assert os.environ.get(METHOD) == expected
    assert len(kept) == (accelerator is None and is_command)
