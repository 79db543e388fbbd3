"""The stub of vLLM has what the sampler and the canvases import, as vLLM has it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
STUB = ROOT / "benchmarks/gpu/stub"
MEASURED = ("sampling", "canvas")
CODE = """
import importlib, json, sys
import numpy, torch, vllm
assert vllm.__file__.endswith("stub/vllm.py")
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
assert "transformers" not in sys.modules
copied = vllm.async_tensor_h2d(numpy.arange(3), device=torch.device("cpu")).tolist()
modules = {path: sorted(names) for path, names in vllm.MODULES.items()}
print(json.dumps({"modules": modules, "fields": vllm.LogprobsTensors._fields, "copied": copied}))
"""


@pytest.fixture(scope="module")
def stub() -> dict[str, Any]:
    """What the stub has, in a process that knows no other vLLM and imports everything that is measured."""
    paths = [path for room in MEASURED for path in (ROOT / "vllm_diffusion" / room).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    names = [name.removesuffix(".__init__") for name in names]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(STUB), str(ROOT)])}
    command = [sys.executable, "-c", CODE, json.dumps(names)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.engine
def test_vllm_has_the_same(stub):
    """The tuple's fields in this order, and an array on the device."""
    from vllm.utils.torch_utils import async_tensor_h2d
    from vllm.v1.outputs import LogprobsTensors

    for path, names in stub["modules"].items():
        module = importlib.import_module(path)
        assert all(hasattr(module, name) for name in names), path
    assert list(LogprobsTensors._fields[:3]) == stub["fields"]
    copied = async_tensor_h2d(np.arange(3), device=torch.device("cpu"))
    assert copied.tolist() == stub["copied"] == [0, 1, 2]
