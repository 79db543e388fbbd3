"""The stub of vLLM has what is imported where it stands in, as vLLM has it, and no more."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
STUB = ROOT / "benchmarks/gpu/stub"
MEASURED = ("sampling", "canvas")


def imported_names() -> dict[str, set[str]]:
    """Names of vLLM that modules of the sampler and of the canvases import when they are imported."""
    found: dict[str, set[str]] = {}
    for room in MEASURED:
        for path in (ROOT / "vllm_diffusion" / room).rglob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm."):
                    found.setdefault(node.module, set()).update(each.name for each in node.names)
                elif isinstance(node, ast.Import):
                    for each in node.names:
                        if each.name.startswith("vllm."):
                            found.setdefault(each.name, set())
    return found


def modules_of_vllm():
    return {k: v for k, v in sys.modules.items() if k.partition(".")[0] == "vllm"}


@pytest.fixture
def stub():
    """The stub's module, loaded while vLLM is away, which has its name again."""
    before = modules_of_vllm()
    for name in before:
        del sys.modules[name]
    try:
        spec = importlib.util.spec_from_file_location("vllm", STUB / "vllm.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["vllm"] = module
        spec.loader.exec_module(module)
    finally:
        for name in modules_of_vllm():
            del sys.modules[name]
        sys.modules.update(before)
    return module


def test_it_has_what_is_imported_and_no_more(stub):
    names = {path: set(have) for path, have in stub.MODULES.items()}
    wanted = imported_names()
    # Read as an attribute.
    wanted["vllm.envs"] = {"VLLM_BATCH_INVARIANT"}
    assert names == wanted


@pytest.mark.engine
def test_vllm_has_the_same(stub):
    """The tuple's fields in this order, and an array on the device."""
    from vllm.utils.torch_utils import async_tensor_h2d
    from vllm.v1.outputs import LogprobsTensors

    for path, names in stub.MODULES.items():
        module = importlib.import_module(path)
        assert all(hasattr(module, name) for name in names), path
    assert LogprobsTensors is not stub.LogprobsTensors
    assert LogprobsTensors._fields[:3] == stub.LogprobsTensors._fields
    for copy in (stub.async_tensor_h2d, async_tensor_h2d):
        assert copy(np.arange(3), device=torch.device("cpu")).tolist() == [0, 1, 2]


def test_the_sampler_runs_on_it():
    """In a process that knows no other vLLM; nothing else of vLLM's is asked for."""
    code = (
        "import vllm, sys\n"
        "assert vllm.__file__.endswith('stub/vllm.py')\n"
        "import vllm_diffusion.sampling.sampler\n"
        "assert 'transformers' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(STUB), str(ROOT)])}
    checked = subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
