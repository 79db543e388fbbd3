"""Another draft in a running engine: what it says stays the target's, what it drafts is the new one's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import drafts
from tests.support.draft_engine import NUM_DRAFTS, OPTIONS, PROMPTS, generate, metric
from tests.support.engine import TracedEngine

pytestmark = pytest.mark.engine


def start(folder: Path, draft: Path, **changes: Any) -> TracedEngine:
    target = folder / "target"
    if not target.exists():
        drafts.save_target("qwen3", target)
    spec = {"method": "dflash", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    options = OPTIONS | {"disable_log_stats": False, "speculative_config": spec}
    return TracedEngine(
        target, **(options | {"weight_transfer_config": {"backend": "safetensors"}} | changes)
    )


def update(engine: TracedEngine, **update_info: str) -> None:
    """As the endpoint does it; in this process nothing else runs meanwhile."""
    engine.llm.start_draft_weight_update()
    engine.llm.update_weights({"update_info": update_info})
    engine.llm.reset_prefix_cache(reset_running_requests=True)
    engine.llm.finish_weight_update()


def counted(engine: TracedEngine) -> list[int]:
    """Verifications and drafts accepted by position, of the same requests each time."""
    engine.llm.reset_prefix_cache()
    before = metric(engine, "num_drafts"), metric(engine, "num_accepted_tokens_per_pos")
    generate(engine, PROMPTS[2:5])
    positions = zip(metric(engine, "num_accepted_tokens_per_pos"), before[1], strict=True)
    return [metric(engine, "num_drafts") - before[0], *(now - then for now, then in positions)]


def addresses(engine: TracedEngine) -> dict[str, int]:
    """Where everything lies that a captured graph reads of the draft."""
    model = engine.runner.speculator.model.model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors |= {name: value for name, value in vars(model).items() if torch.is_tensor(value)}
    assert {"_fused_kv_weight", "_k_norm_weights", "_hidden_norm_weight"} < set(tensors)
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafts that are as random as one another."""
    made = tmp_path_factory.mktemp("swaps")
    for seed in (1, 2):
        drafts.save_draft(made / str(seed), seed=seed)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TracedEngine]:
    served = start(folder, folder / "1")
    yield served
    served.close()


def test_swaps(engine: TracedEngine, folder: Path, models: Any) -> None:
    """There and back: each draft's own counters, at the same addresses; greedy tokens throughout."""
    expected = [drafts.greedy_tokens(models["qwen3"], prompt, 30) for prompt in PROMPTS]
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
    for prompt, output, tokens in zip(PROMPTS, generate(engine, PROMPTS), expected, strict=True):
        assert list(output.outputs[0].token_ids) == tokens, len(prompt)


def unfit(folder: Path, kind: str) -> tuple[Path, str]:
    """A draft's folder that cannot be taken, and what its refusal names."""
    bad = drafts.save_draft(folder / kind, seed=3)
    weights = bad / "model.safetensors"
    tensors, config = load_file(weights), json.loads((bad / "config.json").read_text())
    name = "layers.1.self_attn.k_norm.weight"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
        return bad, "truncated"
    if kind == "no weights":
        weights.unlink()
        return bad, "holds no safetensors file"
    if kind == "named pipe":
        os.mkfifo(bad / "more.safetensors")
        return bad, "holds more.safetensors, which is a named pipe"
    if kind == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif kind == "kind of number":
        tensors[name] = tensors[name].to(torch.int32)
    elif kind == "missing":
        del tensors[name]
    elif kind == "not finite":
        tensors[name][3] = float("nan")
    elif kind == "unknown":
        tensors = {name + "s" if each == name else each: tensors[each] for each in tensors}
    else:
        changes: dict[str, Any] = {
            "block_size": 4,
            "target_layer_ids": [0, 2],
            "mask_token_id": 3,
            "num_target_layers": 9,
            "num_attention_heads": 2,
            "vocab_size": 99,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
            "causal": True,
            "architectures": ["DFlashMaskedDraftModel"],
            "quantization_config": {"quant_method": "fp8"},
        }
        inner = ("target_layer_ids", "mask_token_id", "causal")
        (config["dflash_config"] if kind in inner else config)[kind] = changes[kind]
        if kind == "rope_parameters":
            del config["rope_theta"]
        (bad / "config.json").write_text(json.dumps(config))
        return bad, "windows" if kind == "causal" else kind
    save_file(tensors, weights)
    return bad, name


UNFIT = (
    "truncated",
    "no weights",
    "named pipe",
    "shape",
    "kind of number",
    "missing",
    "not finite",
    "unknown",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "num_target_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "rope_parameters",
    "causal",
    "architectures",
    "quantization_config",
)


def test_refusals(engine: TracedEngine, folder: Path, tmp_path: Path) -> None:
    """Each names what does not fit, and the old draft drafts as it did."""
    update(engine, path=str(folder / "1"))
    lies_at, first = addresses(engine), counted(engine)
    for kind in UNFIT:
        bad, words = unfit(tmp_path, kind)
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            update(engine, path=str(bad))
        assert words in str(raised.value), f"{kind}: {raised.value}"
    # The longest path that Linux takes has 4,096 bytes.
    too_long = Path("/" + "d/" * 2500)
    for path in (tmp_path / "absent", folder / "1" / "config.json", too_long):
        with pytest.raises(ValueError, match="absolute path of a draft's folder"):
            update(engine, path=str(path))
    for info in ({"replaced": "restored"}, {"replaced": "drop", "path": str(folder / "2")}):
        with pytest.raises(ValueError, match=r"update_info\.replaced"):
            update(engine, **info)
    assert counted(engine) == first
    assert addresses(engine) == lies_at


def test_failed_load(engine: TracedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails half-way is undone, and nothing is left open."""
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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "DFlashMaskedDraftModel"])
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_in_flight(is_async: bool, architecture: str, models: Any, tmp_path: Path) -> None:
    """Three swaps in mid-answer of eight requests: the target's tokens; then as a server begun with it."""
    from vllm import SamplingParams

    several = {"additional_config": {"drafting": {"steps": 3}}}
    changes: dict[str, Any] = {"async_scheduling": is_async}
    if architecture == "DFlashMaskedDraftModel":
        changes |= several
    for seed in (1, 2):
        drafts.save_draft(tmp_path / str(seed), seed=seed, architectures=[architecture])
    expected = [drafts.greedy_tokens(models["qwen3"], prompt, 40) for prompt in PROMPTS]
    engine = start(tmp_path, tmp_path / "1", **changes)
    try:
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False)
        llm = engine.llm.llm_engine
        for number, prompt in enumerate(PROMPTS):
            llm.add_request(str(number), {"prompt_token_ids": prompt}, params)
        said: dict[str, list[int]] = {}
        for step in range(1000):
            if not llm.has_unfinished_requests():
                break
            if step in (4, 9, 14):
                assert llm.has_unfinished_requests()
                update(engine, path=str(tmp_path / ("1" if step == 9 else "2")))
            for output in llm.step():
                said[output.request_id] = list(output.outputs[0].token_ids)
        assert [said[str(number)] for number in range(len(PROMPTS))] == expected
        assert engine.preempted
        swapped = counted(engine)
    finally:
        engine.close()
    engine = start(tmp_path, tmp_path / "2", **changes)
    try:
        assert counted(engine) == swapped
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adaptive_drafts_forget(folder: Path) -> None:
    """What was learnt of the old draft is not held against the new one."""
    engine = start(folder, folder / "1", additional_config={"drafting": {"adaptive": True}})
    try:
        generate(engine, PROMPTS)
        draft = engine.scheduler.draft
        fresh = type(draft.acceptance)(NUM_DRAFTS).tokens([])
        assert draft.acceptance.tokens([]) != fresh
        update(engine, path=str(folder / "2"))
        assert draft.acceptance.tokens([]) == fresh
        assert draft.choose(["one"], 10) == NUM_DRAFTS
    finally:
        engine.close()
