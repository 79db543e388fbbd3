"""With this package installed and no diffusion model served, vLLM is unchanged."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.commands import run
from tests.support.engines.snapshot import OURS

pytestmark = pytest.mark.engine

SNAPSHOT = Path(__file__).resolve().parents[1] / "support/engines/snapshot.py"

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
OTHER_MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **SMALL,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


ENVIRONMENTS = {
    "stock": {"VLLM_PLUGINS": ""},
    "disabled": {"VLLM_DIFFUSION_DISABLE": "1"},
    "models on the platform alone": {"VLLM_PLUGINS": "vllm_diffusion_cpu"},
    "models with all plugins": {},
}


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what :mod:`tests.support.engines.snapshot` prints under each of them.

    Each process takes many seconds to import vLLM, so they run two at a time.
    """
    folder, models = tmp_path_factory.mktemp("models"), []
    for name, config in OTHER_MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        models.append(str(folder / name))
    # This process's own platform hid the accelerators.
    own = ("VLLM_DIFFUSION", "VLLM_PLUGINS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}

    def taken(name: str) -> Any:
        # Without a platform there is nothing to configure a model for.
        command = [sys.executable, SNAPSHOT, *(models if "model" in name else [])]
        done = run(*command, env=inherited | ENVIRONMENTS[name], timeout=800)
        (line,) = (x for x in done.stdout.splitlines() if x.startswith("SNAPSHOT"))
        return json.loads(line.removeprefix("SNAPSHOT"))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ENVIRONMENTS, pool.map(taken, ENVIRONMENTS), strict=True))


def test_disabled_is_stock(snapshots: dict[str, Any]) -> None:
    """VLLM_DIFFUSION_DISABLE=1 restores platform, model, checks and validation."""
    stock = snapshots["stock"]["tables"]
    assert snapshots["disabled"]["tables"] == stock
    ours = [stock["platform"], stock["model"], stock["config_hook"], *stock["validation"]]
    assert not any("vllm_diffusion" in name for name in ours)


def test_enabled_is_not_stock(snapshots: dict[str, Any]) -> None:
    """The snapshot sees each of the things that are ours."""
    tables = snapshots["models with all plugins"]["tables"]
    for name in (tables["model"], tables["config_hook"], *tables["validation"]):
        assert name.startswith("vllm_diffusion.")


def test_only_the_platform_is_stock_but_for_the_platform(snapshots: dict[str, Any]) -> None:
    """VLLM_PLUGINS=vllm_diffusion_cpu serves stock's class, with stock's checks."""
    stock = dict(snapshots["stock"]["tables"])
    alone = dict(snapshots["models on the platform alone"]["tables"])
    stock.pop("platform")
    alone.pop("platform")
    assert alone == stock


def test_other_entries_are_untouched(snapshots: dict[str, Any]) -> None:
    """Other architectures' entries are unchanged, and only the names of NeMo's drafts are new."""
    stock = snapshots["stock"]["tables"]
    ours = snapshots["models with all plugins"]["tables"]
    assert not OURS & set(ours["other_models"])
    assert len(stock["other_models"]) > 100
    added = {"Qwen3DFlashDraftModel", "Qwen3DFlash2DraftModel"}
    # vLLM puts its method before a draft's name.
    added |= {f"DFlash{name}" for name in added}
    assert ours["other_models"].keys() - stock["other_models"].keys() == added
    kept = {name: what for name, what in ours["other_models"].items() if name not in added}
    assert kept == stock["other_models"]
    assert ours["other_config_hooks"] == stock["other_config_hooks"]


@pytest.mark.parametrize("model", range(len(OTHER_MODELS)), ids=OTHER_MODELS)
@pytest.mark.parametrize("part", ["scheduler", "config", "hash", "requests"])
def test_other_model(part: str, model: int, snapshots: dict[str, Any]) -> None:
    """Another model's configuration is field by field the same with the plugin and without."""
    without = snapshots["models on the platform alone"]["models"][model][part]
    assert snapshots["models with all plugins"]["models"][model][part] == without
    if part == "requests":
        # The comparison is of something: two are accepted, several refused.
        assert without["plain"] is None
        assert without["edits"] is None
        assert without["too many logprobs"] is not None
