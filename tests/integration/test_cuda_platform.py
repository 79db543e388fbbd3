"""What vLLM asks on CUDA's platform, and the CPU platform answers by itself, is answered by ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import mocked_cuda
from tests.support.families.cases import CASES
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.families.registry import FAMILIES

pytestmark = pytest.mark.engine

BACKEND = "vllm_diffusion.attention.backend.CanvasAttentionBackend"
NOTHING: dict[str, list[str]] = {"modules": [], "functions": [], "environment": []}
# One of each architecture, and Nemotron's other rule.
MASKED = ("sdar", "sdar-moe", "llada2.2", "nemotron", "fast-dllm", "stable-diffcoder")
RULE = json.dumps({"diffusion": {"rule": "linear_spec"}})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of every family in a process that configures, and in one that it spawned."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {name: str(CASES[name].make().save(folder / name)) for name in MASKED}
    runs = [["--model", path] for path in (str(shipped_checkpoint()), *paths.values())]
    runs.append(["--model", paths["nemotron"], "--additional-config", RULE])
    return mocked_cuda.run(runs, tmp_path_factory.mktemp("driver"))


@pytest.mark.timeout(300)
def test_a_spawned_engine_makes_every_family(found):
    """With the defaults of ``vllm serve``, and nothing but the configuration to go by."""
    assert found["platform"] == "cuda"
    models = found["engine"]["models"]
    assert [model.get("error") for model in models] == [None] * len(models)
    assert {model["architecture"] for model in models} == {
        family.architecture for family in FAMILIES
    }
    assert set(found["chosen"]) == {"CUSTOM"}
    for model in models:
        assert model["attention"] == [BACKEND]
        assert model["model"].startswith("vllm_diffusion.families.")
        assert model["state"].startswith("vllm_diffusion.")


def test_the_cpu_platform_leaves_no_trace(found):
    """Its modules are not imported, and what they replace in torch and vLLM is as it was."""
    assert found["traces"] == NOTHING
    assert found["engine"]["traces"] == NOTHING
