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


@pytest.fixture
def stub(monkeypatch):
    """Loaded beside vLLM, which keeps its name."""
    before = dict(sys.modules)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.spec_from_file_location("vllm", STUB / "vllm.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vllm", module)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update({k: v for k, v in before.items() if k.partition(".")[0] == "vllm"})


def test_it_has_what_is_imported_and_no_more(stub):
    names = {path: set(have) for path, have in stub.MODULES.items()}
    wanted = imported_names()
    # Read as an attribute.
    wanted["vllm.envs"] = {"VLLM_BATCH_INVARIANT"}
    assert names == wanted


@pytest.mark.engine
def test_vllm_has_the_same(stub):
    """The tuple's fields in this order, and an array on the device."""
    tuple_of_stub, copy = stub.LogprobsTensors, stub.async_tensor_h2d
    copied = copy(np.arange(3), device=torch.device("cpu"))
    assert copied.tolist() == [0, 1, 2]
    code = (
        "import importlib, json, sys\n"
        "for path, names in json.load(sys.stdin).items():\n"
        "    module = importlib.import_module(path)\n"
        "    assert all(hasattr(module, name) for name in names), path\n"
        "from vllm.v1.outputs import LogprobsTensors\n"
        f"assert LogprobsTensors._fields[:3] == {tuple_of_stub._fields}\n"
        "import numpy, torch\n"
        "from vllm.utils.torch_utils import async_tensor_h2d\n"
        "copied = async_tensor_h2d(numpy.arange(3), device=torch.device('cpu'))\n"
        "assert copied.tolist() == [0, 1, 2]\n"
    )
    import json

    given = json.dumps({path: sorted(names) for path, names in stub.MODULES.items()})
    checked = subprocess.run(
        [sys.executable, "-c", code], input=given, text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


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
