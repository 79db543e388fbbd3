"""Tests of how processes begin that vLLM starts where no accelerator is."""

import os
import sys
from types import ModuleType

import pytest

from vllm_diffusion import cpu
from vllm_diffusion.startup import environment, machine

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
