"""Another draft in a running engine: the answers stay the target's, the drafts become the new
one's.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.draft_engine import (
    NUM_DRAFTS,
    PROMPTS,
    assert_greedy,
    generate,
    metric,
    serving,
)
from tests.support.engines.engine import TracedEngine
from tests.support.models import drafts

pytestmark = pytest.mark.engine


def update(engine: TracedEngine, **update_info: str) -> None:
    """Update the draft as the endpoint does; in this process nothing else runs meanwhile."""
    engine.llm.start_draft_weight_update()
    engine.llm.update_weights({"update_info": update_info})
    engine.llm.reset_prefix_cache(reset_running_requests=True)
    engine.llm.finish_weight_update()


def counted(engine: TracedEngine) -> list[int]:
    """Count verifications, and accepted drafts by position, of the same requests each time."""
    engine.llm.reset_prefix_cache()
    before = metric(engine, "num_drafts"), metric(engine, "num_accepted_tokens_per_pos")
    generate(engine, PROMPTS[2:5])
    positions = zip(metric(engine, "num_accepted_tokens_per_pos"), before[1], strict=True)
    return [metric(engine, "num_drafts") - before[0], *(now - then for now, then in positions)]


def addresses(engine: TracedEngine) -> dict[str, int]:
    """Return the address of every tensor of the draft that a captured graph reads."""
    model = engine.runner.speculator.model.model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors |= {name: value for name, value in vars(model).items() if torch.is_tensor(value)}
    assert {"_fused_kv_weight", "_k_norm_weights", "_hidden_norm_weight"} < set(tensors)
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafts with random weights of different seeds."""
    made = tmp_path_factory.mktemp("swaps")
    for seed in (1, 2):
        drafts.save_draft(made / str(seed), seed=seed)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[TracedEngine]:
    """A draft of vLLM's class, or of this package's with the settings of a test."""
    spec = {"method": "dflash", "model": str(folder / "1"), "num_speculative_tokens": NUM_DRAFTS}
    drafting = getattr(request, "param", None)
    swaps = {"weight_transfer_config": {"backend": "safetensors"}}
    with serving(folder, spec, drafting, **swaps) as served:
        yield served


@pytest.mark.parametrize(
    "engine",
    [None, pytest.param({"steps": 3}, marks=pytest.mark.slow)],
    indirect=True,
    ids=["one pass", "three passes"],
)
def test_swaps(engine: TracedEngine, folder: Path, models: Any) -> None:
    """After each swap of two drafts, there and back, the counters are those of the draft that is
    loaded, its tensors keep their addresses, and greedy answers stay the target's.
    """
    lies_at, first = addresses(engine), counted(engine)
    assert sum(first[1:]) > 0
    update(engine, path=str(folder / "2"))
    second = counted(engine)
    assert second != first
    for _ in range(2):
        update(engine, path=str(folder / "1"))
        assert counted(engine) == first
        update(engine, replaced="restore")
        assert counted(engine) == second
    update(engine, path=str(folder / "1"))
    update(engine, replaced="drop")
    with pytest.raises(ValueError, match="no draft was replaced"):
        update(engine, replaced="restore")
    assert counted(engine) == first
    assert addresses(engine) == lies_at
    assert_greedy(engine, models["qwen3"])


# Fields of ``config.json`` that another draft may not change; those behind are among the ones of
# DFlash.
OTHERS: dict[str, Any] = {
    "num_target_layers": 9,
    "num_attention_heads": 2,
    "vocab_size": 99,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    "architectures": ["DFlashMaskedDraftModel"],
    "quantization_config": {"quant_method": "fp8"},
}
OTHERS_OF_DFLASH = {"target_layer_ids": [0, 2], "mask_token_id": 3, "causal": True}
NAME = "layers.1.self_attn.k_norm.weight"
# What a file of weights may not be, and what its refusal names.
WEIGHTS = {
    "truncated": "truncated",
    "no weights": "holds no safetensors file",
    "named pipe": "holds more.safetensors, which is a named pipe",
    **dict.fromkeys(("shape", "kind of number", "missing", "not finite", "unknown"), NAME),
}


def unfit(folder: Path, kind: str) -> tuple[Path, str]:
    """Return the folder of a draft that cannot be loaded, and what its refusal names."""
    bad = drafts.save_draft(folder / kind, seed=3)
    weights = bad / "model.safetensors"
    if kind not in WEIGHTS:
        config = json.loads((bad / "config.json").read_text())
        if kind in OTHERS_OF_DFLASH:
            config["dflash_config"][kind] = OTHERS_OF_DFLASH[kind]
        else:
            config[kind] = OTHERS[kind]
        if kind == "rope_parameters":
            del config["rope_theta"]
        (bad / "config.json").write_text(json.dumps(config))
        return bad, "windows" if kind == "causal" else kind
    tensors = load_file(weights)
    if kind == "shape":
        tensors[NAME] = tensors[NAME][:-1].clone()
    elif kind == "kind of number":
        tensors[NAME] = tensors[NAME].to(torch.int32)
    elif kind in ("missing", "unknown"):
        tensor = tensors.pop(NAME)
        tensors |= {NAME + "s": tensor} if kind == "unknown" else {}
    elif kind == "not finite":
        tensors[NAME][3] = float("nan")
    save_file(tensors, weights)
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "named pipe":
        os.mkfifo(bad / "more.safetensors")
    return bad, WEIGHTS[kind]


def test_refusals(engine: TracedEngine, folder: Path, tmp_path: Path) -> None:
    """Each refusal of a draft names what does not fit, and the old draft proposes the same as
    before.
    """
    update(engine, path=str(folder / "1"))
    lies_at, first = addresses(engine), counted(engine)
    for kind in (*WEIGHTS, *OTHERS, *OTHERS_OF_DFLASH):
        bad, words = unfit(tmp_path, kind)
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            update(engine, path=str(bad))
        assert words in str(raised.value), f"{kind}: {raised.value}"
    # The longest path that Linux takes has 4,096 bytes, the longest name 255.
    too_long = Path("/" + "d/" * 2500), Path("/" + "d" * 300)
    for path in (tmp_path / "absent", folder / "1" / "config.json", *too_long):
        with pytest.raises(ValueError, match="absolute path of a draft's folder"):
            update(engine, path=str(path))
    for info in ({"replaced": "restored"}, {"replaced": "drop", "path": str(folder / "2")}):
        with pytest.raises(ValueError, match=r"update_info\.replaced"):
            update(engine, **info)
    assert counted(engine) == first
    assert addresses(engine) == lies_at


def test_failed_load(engine: TracedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that fails halfway is undone, and the next update can begin."""
    update(engine, path=str(folder / "1"))
    first = counted(engine)
    model = engine.runner.speculator.model.model
    load = type(model).load_weights

    def failing(self: Any, weights: Any) -> Any:
        load(self, list(weights)[:9])
        raise OSError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(type(model), "load_weights", failing)
        with pytest.raises(OSError, match="the device is gone"):
            update(engine, path=str(folder / "2"))
    assert counted(engine) == first
    # vLLM's update goes on after a failure: it is closed with nothing planned.
    engine.llm.finish_weight_update()
    assert counted(engine) == first
    update(engine, path=str(folder / "2"))
    assert counted(engine) != first
