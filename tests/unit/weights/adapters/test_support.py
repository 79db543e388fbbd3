"""An adapter that does not fit is refused in one sentence before anything of it is loaded."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.support.engines.stock import run_in_stock
from tests.support.models.adapters import (
    CONDITIONING,
    DECODER,
    ENCODER,
    EXPERTS,
    adapt,
    put_into_hub_cache,
    write_adapter,
)
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
from vllm_diffusion.weights.adapters.support import (
    AdapterSupport,
    Module,
    adapted_modules,
    local_folder,
)

pytestmark = pytest.mark.engine

Q = "model.decoder.layers.0.self_attn.q_proj"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return adapted_modules(DiffusionGemmaTensors(), AutoConfig.from_pretrained(SHIPPED))


@pytest.fixture
def support(modules: dict[str, Module]) -> AdapterSupport:
    return AdapterSupport(modules, max_rank=8)


def pair(name: str = Q, out: int = 128, into: int = 128, rank: int = 4) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_A": torch.zeros(rank, into), f"{name}.lora_B": torch.zeros(out, rank)}


def filled(half: str, value: float) -> dict[str, torch.Tensor]:
    tensors = pair()
    tensors[f"{Q}.lora_{half}"][-1, -1] = value
    return tensors


def test_everything_that_peft_finds(support: AdapterSupport, tmp_path: Path) -> None:
    """Every module that PEFT adapts is accepted under PEFT's own names and shapes."""
    from transformers import DiffusionGemmaForBlockDiffusion

    model = DiffusionGemmaForBlockDiffusion.from_pretrained(SHIPPED)
    targets = f"{ENCODER}|{DECODER}|{CONDITIONING}"
    adapt(model, tmp_path, target_modules=targets, target_parameters=EXPERTS)
    support.check(str(tmp_path))
    names = {name.rpartition(".lora_")[0] for name in load_file(tmp_path / WEIGHTS)}
    published = [name for name, module in support.modules.items() if not module.parts]
    assert {f"base_model.model.{name}" for name in published} == names


def test_shared_stack(support: AdapterSupport, tmp_path: Path) -> None:
    """An adapter of a single stack is accepted for the encoder's and the decoder's modules."""
    shared = {name: module for name, module in support.modules.items() if module.parts}
    assert {part for module in shared.values() for part in module.parts} == {
        name for name, module in support.modules.items() if not module.parts
    }
    assert shared[Q.replace("decoder.", "")].parts == (
        Q,
        Q.replace("decoder.", "encoder.language_model."),
    )
    tensors = {
        name: x
        for module, (out, into, number, _) in shared.items()
        for name, x in pair(module, out, into).items()
        if number == 1
    }
    support.check(str(write_adapter(tmp_path, tensors)))


# Each with what stock does with such an adapter of its Qwen3; nothing where Qwen3 has no such
# module, or serves it.
MISFITS = [
    (pair("transformer.h.0.attn.c_attn"), {}, "it adapts transformer.h.0.attn.c_attn, which this model has not; serve it with the model that it was trained on", "request"),
    (pair() | pair(Q.replace("decoder.", "")), {}, f"it adapts model.layers.0.self_attn.q_proj, which is {Q} too, and adapts that as well; keep one of them", ""),
    (pair("model.decoder.embed_tokens"), {}, "it adapts model.decoder.embed_tokens, but the vocabulary is read in tiles", ""),
    (pair("lm_head"), {}, "it adapts lm_head, but the vocabulary is read in tiles", ""),
    (pair("model.encoder.vision_tower.patch_embedder.input_proj"), {}, "but images are read with the checkpoint's own weights", "request"),
    (pair(into=64), {}, f"{Q}.lora_A is F32 [4, 64], but by this model and {CONFIG} it must be F32 or F16 or BF16 [4, 128]", "answers, from half of the numbers"),
    (pair(), {"r": 8}, f"{Q}.lora_A is F32 [4, 128], but by this model and {CONFIG} it must be F32 or F16 or BF16 [8, 128]", "answers, at twice or half of the trained scale"),
    (pair(rank=16), {"r": 16}, "its rank 16 is above --max-lora-rank 8; start the server with a larger one", "request"),
    ({f"{Q}.lora_A": torch.zeros(4, 128)}, {}, f"{Q} has no lora_B; copy the adapter again", "request"),
    (pair() | {f"{Q}.lora_magnitude_vector": torch.zeros(128)}, {}, "lora_magnitude_vector.weight, which is not a matrix of a LoRA adapter", "request"),
    ({}, {}, "holds no tensors", "request"),
    (pair("model.decoder.layers.0.experts", into=512, rank=16), {}, "has nothing for model.decoder.layers.0.experts.base_layer; train it on all of a layer's experts", ""),
    (pair(), {"peft_type": "IA3"}, "peft_type='IA3' must be \"LORA\"", "answers, as if it were LoRA"),
    (pair(), {"r": "4"}, "r='4' must be an integer of at least 1", "request"),
    (pair(), {"lora_alpha": None}, "lora_alpha=None must be a finite number above 0", "request"),
    (pair(), {"lora_alpha": float("inf")}, "lora_alpha=inf must be a finite number above 0", "answers: NaN, token 0"),
    (pair(), {"lora_alpha": float("nan")}, "lora_alpha=nan must be a finite number above 0", "answers: NaN, token 0"),
    (pair(), {"alpha_pattern": {"q_proj": float("inf")}}, "must be an object of finite numbers above 0", "answers: NaN, token 0"),
    (filled("A", float("nan")), {}, f"{Q}.lora_A, scaled by lora_alpha and r, holds numbers that are not finite", "answers: NaN, token 0"),
    (filled("B", float("-inf")), {}, f"{Q}.lora_B, scaled by lora_alpha and r, holds numbers that are not finite", "answers: NaN, token 0"),
    (filled("B", 1e30), {"lora_alpha": 1e30}, f"{Q}.lora_B, scaled by lora_alpha and r, holds numbers that are not finite", "answers: NaN, token 0"),
    (pair(), {"bias": "all"}, "bias='all' must be \"none\"", "request"),
    (pair(), {"use_dora": True}, "use_dora=True must be left out", "request"),
    (pair(), {"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] must be left out", "request"),
    (pair(), {"rank_pattern": {"q_proj": 0}}, "rank_pattern={'q_proj': 0} must be an object of integers of at least 1", "request"),
    (pair(), {"rank_pattern": ["q_proj"]}, "rank_pattern=['q_proj'] must be an object", "request"),
    (pair(), {"init_lora_weights": "pissa"}, "init_lora_weights='pissa' must be one that leaves", "request"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "sentence", "stock"), MISFITS)
def test_misfits(
    support: AdapterSupport,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    sentence: str,
    stock: str,
) -> None:
    """An adapter that does not fit is refused with its folder and the reason."""
    write_adapter(tmp_path, tensors, config)
    with pytest.raises(ValueError, match="^LoRA adapter") as raised:
        support.check(str(tmp_path))
    assert sentence in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_misfits_in_stock(tmp_path: Path) -> None:
    """Without the check, vLLM fails unclearly at a request or answers wrongly."""

    def of_qwen(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            name.replace("model.decoder.", "model."): x
            if x.any()
            else x.normal_(generator=generator)
            for name, x in tensors.items()
        }

    server = {"model": str(shipped_checkpoint("qwen3")), "enable_lora": True, "max_lora_rank": 8}
    rows = [(pair(), {}, "", "answers"), *(row for row in MISFITS if row[-1])]
    jobs: list[dict[str, Any]] = [server]
    for i, (tensors, config, _, _) in enumerate(rows):
        adapter = write_adapter(tmp_path / str(i), of_qwen(tensors), config)
        jobs.append(server | {"adapter": str(adapter)})
    without, *outcomes = run_in_stock(jobs)
    for (_, _, sentence, stock), outcome in zip(rows, outcomes, strict=True):
        assert outcome.get("stage", "answers") == re.split("[,:]", stock)[0], (sentence, outcome)
        assert outcome.get("tokens") != without["tokens"], sentence
        assert ("token 0" in stock) == ("tokens" in outcome and not any(outcome["tokens"]))


@pytest.mark.parametrize(
    "config", [{"fan_in_fan_out": True}, {"rank_pattern": []}, {"modules_to_save": []}], ids=str
)
def test_settings_of_nothing_here(
    support: AdapterSupport, tmp_path: Path, config: dict[str, Any]
) -> None:
    """Settings of PEFT that concern no module of this model are accepted."""
    support.check(str(write_adapter(tmp_path, pair(), config)))


def test_files(support: AdapterSupport, tmp_path: Path) -> None:
    """A missing folder, missing files and damaged files are each named."""

    def said() -> str:
        with pytest.raises(ValueError, match="^LoRA adapter") as raised:
            support.check(str(tmp_path / "adapter"))
        return str(raised.value)

    assert "there is no such folder" in said()
    folder = write_adapter(tmp_path / "adapter", pair())
    support.check(str(folder))
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-5])
    assert "is truncated or not a safetensors file" in said()
    (folder / WEIGHTS).write_bytes(b"weights")
    assert "is truncated or not a safetensors file" in said()
    (folder / WEIGHTS).unlink()
    assert f"it has no {WEIGHTS}" in said()
    (folder / WEIGHTS).write_bytes(whole)
    support.check(str(folder))
    for text, sentence in (
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "nested too deeply"),
    ):
        (folder / CONFIG).write_text(text)
        assert sentence in said()
    (folder / CONFIG).unlink()
    assert f"it has no {CONFIG}" in said()
    os.mkfifo(folder / CONFIG)
    assert f"it holds {CONFIG}, which is a named pipe and not a regular file" in said()


def test_loaded_again(support: AdapterSupport, tmp_path: Path) -> None:
    """Changed files cannot be loaded under the same name, whose prompts may be cached."""
    folder = write_adapter(tmp_path / "adapter", pair())
    support.check_loading("poet", str(folder))
    support.check_loading("poet", str(folder))
    write_adapter(folder, pair(rank=2), {"r": 2})
    support.check(str(folder))
    with pytest.raises(
        ValueError, match="have changed since it was loaded as 'poet'.*another name"
    ):
        support.check_loading("poet", str(folder))
    support.check_loading("writer", str(folder))


def test_options(modules: dict[str, Module], tmp_path: Path) -> None:
    """Modules that options exclude, and experts that cannot be adapted, are refused."""
    folder = str(write_adapter(tmp_path, pair()))
    AdapterSupport(modules, 8, target_modules=("qkv_proj",)).check(folder)
    AdapterSupport(modules, 8, target_modules=("v_proj", "o_proj")).check(folder)
    with pytest.raises(ValueError, match=f"{Q}, which --lora-target-modules leaves out"):
        AdapterSupport(modules, 8, target_modules=("o_proj",)).check(folder)
    experts = "model.decoder.layers.0.experts"
    both = pair(f"{experts}.base_layer", out=256, rank=16) | pair(experts, rank=16)
    folder = str(write_adapter(tmp_path / "experts", both))
    AdapterSupport(modules, 8).check(folder)
    with pytest.raises(ValueError, match=f"it adapts {experts}, but not here"):
        AdapterSupport(modules, 8, no_experts="not here").check(folder)


def test_names_of_repositories(
    support: AdapterSupport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetched repository is read from the cache; a missing path or repository is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path in ("x" * 5000, "d/" * 2500, "~nobody at all/adapter", "a\0b"):
        with pytest.raises(ValueError, match="there is no such folder"):
            support.check(path)
    for path in ("adapter", "./a/b", "/a/b", "a/b/c", "~/adapter"):
        assert local_folder(path) == Path(path).expanduser()
    with pytest.raises(
        ValueError,
        match=r"someone/poet: there is no such folder, and no repository of .* Cannot find .*; give the folder that .*, or the name of a repository",
    ):
        support.check("someone/poet")
    snapshots = [
        put_into_hub_cache(
            tmp_path / "cache", f"someone/{name}", write_adapter(tmp_path / name, tensors)
        )
        for name, tensors in (("poet", pair()), ("clerk", pair(into=64)))
    ]
    assert support.check("someone/poet") == snapshots[0]
    with pytest.raises(ValueError, match=r"snapshots/.*lora_A is F32 \[4, 64\]"):
        support.check("someone/clerk")
    # It is what it was, whatever the name stands for meanwhile; unless it is gone from this
    # machine.
    shutil.rmtree(tmp_path / "cache" / "models--someone--poet" / "refs")
    assert support.check("someone/poet") == snapshots[0]
    shutil.rmtree(snapshots[0])
    with pytest.raises(ValueError, match="someone/poet: there is no such folder"):
        support.check("someone/poet")
    (tmp_path / "someone" / "poet").mkdir(parents=True)
    assert local_folder("someone/poet") == Path("someone/poet")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)
KEYS = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "bias", "use_rslora",
        "init_lora_weights", "target_modules", "modules_to_save", "use_dora")  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    config=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3),
    shape=st.lists(st.integers(0, 130), max_size=3),
    name=st.sampled_from([Q, "model.decoder.layers.0.experts", "lm_head"]) | st.text(max_size=20),
    cut=st.none() | st.integers(0, 400),
)
def test_whatever_it_holds(
    modules: dict[str, Module],
    tmp_path: Path,
    config: dict[str, Any],
    shape: list[int],
    name: str,
    cut: int | None,
) -> None:
    """An adapter with any content fits or is refused in one line with its folder."""
    folder = write_adapter(tmp_path, pair(), config)
    save_file({f"{name}.lora_A.weight": torch.zeros(shape)}, folder / WEIGHTS)
    if cut is not None:
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:cut])
    with pytest.raises(ValueError, match="^LoRA adapter") as raised:
        AdapterSupport(modules, 8).check(str(folder))
    assert "\n" not in str(raised.value)
    (folder / CONFIG).write_text(json.dumps(config)[:cut])
    with pytest.raises(ValueError, match="^LoRA adapter"):
        AdapterSupport(modules, 8).check(str(folder))
