"""What a masked family cannot serve is refused by name, before loading or at the request."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.loading import load, one_rank
from tests.support.engines.refused import refusal, refusal_of_row, refused_rows
from tests.support.engines.vllm_configs import configure
from tests.support.families import makers as tiny
from tests.support.families.cases import CASES
from tests.support.families.llada2_model import DELETE_ID, SPLIT_ID, llada2, llada2_2
from tests.support.families.mineru_model import mineru
from tests.support.families.model import MASK_ID, TinyModel
from tests.support.models.specs import masked_spec
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.levenshtein import Levenshtein
from vllm_diffusion.families.mineru.pictures import image_processor

pytestmark = pytest.mark.engine


def changed(folder: Path, **values: Any) -> Path:
    """Return a copy of the folder with other values in ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def setting(**settings: Any) -> dict[str, Any]:
    """Return options of an engine with these settings."""
    return {"additional_config": {"diffusion": settings}}


LINEAR_SPEC = {"rule": "linear_spec"}
NO_CACHE = "no cache of them is exact"
# Of the table.
MODELS: dict[str, Callable[[], TinyModel]] = {
    "sdar": tiny.sdar,
    "sdar_32": partial(tiny.sdar, block_length=32),
    "no_blocks": replace(tiny.sdar, block_length_key=None),
    "dream": tiny.dream,
    "llada": tiny.llada,
    "llada_moe": tiny.llada_moe,
    "llada2": llada2,
    "llada2_2": llada2_2,
    "mineru": mineru,
    "nemotron": tiny.nemotron,
}


@pytest.mark.parametrize("row", refused_rows(__file__))
def test_refused(row: dict[str, Any], tmp_path: Path) -> None:
    """A wrong file, option of vLLM or setting is refused by name, with the remedy."""
    folder = changed(MODELS[row["model"]]().save(tmp_path), **row.get("config", {}))
    message = refusal_of_row(row, folder)
    assert (NO_CACHE in message) == (NO_CACHE in row["says"])


def test_lladas_harmless_fields(tmp_path: Path) -> None:
    """A LLaDA starts if fields that may change layers have the published values or null."""
    own = tiny.llada()
    published = {
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "embedding_size": own.config["vocab_size"],
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "multi_query_attention": None,
        "rope": True,
        "scale_logits": False,
    }
    folder = own.save(tmp_path)
    assert configure(changed(folder, **published)).model_config.diffusion is not None
    nothing = dict.fromkeys(published)
    assert configure(
        changed(folder, **nothing | {"activation_type": "silu"})
    ).model_config.diffusion
    one_head = configure(changed(folder, n_kv_heads=1, multi_query_attention=True))
    assert one_head.model_config.hf_config.num_key_value_heads == 1


def test_minerus_files(tmp_path: Path) -> None:
    """The publisher's names are read, and a missing file of the pictures is named."""
    folder = mineru().save(tmp_path)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for name, other in (
        ("text_config", "language_model_config"),
        ("vision_config", "vision_model_config"),
    ):
        values[other] = values.pop(name)
    path.write_text(json.dumps(values))
    config = configure(folder).model_config.hf_config
    assert config.text_config.hidden_size == values["language_model_config"]["hidden_size"]
    assert config.vision_config.embed_dim == values["vision_model_config"]["embed_dim"]
    (folder / "preprocessor_config.json").rename(tmp_path / "elsewhere.json")
    image_processor.cache_clear()
    assert "preprocessor_config.json of" in refusal(folder)


def test_token_that_is_null(tmp_path: Path) -> None:
    """A null token id in LLaDA2.2's configuration is refused by name."""
    message = refusal(changed(llada2_2().save(tmp_path), delete_token_id=None))
    assert "delete_token_id=None" in message
    assert "vocab_size=320" in message


def test_llada2_2_is_told_by_its_capacity(tmp_path: Path) -> None:
    """LLaDA2.2 is recognized by its capacity, whatever its folder is called."""
    folder = llada2_2().save(tmp_path / "LLaDA2.1-renamed")
    spec = configure(folder).model_config.diffusion.spec
    assert isinstance(spec.ways[0].rule, Levenshtein)
    assert (spec.ways[0].rule.delete_token_id, spec.ways[0].rule.split_token_id) == (
        DELETE_ID,
        SPLIT_ID,
    )
    assert spec.max_denoising_steps == 1000
    assert spec.settings == {
        "reveal_threshold": 0.5,
        "strategy": "dynamic",
        "editing_threshold": 0.0,
        "max_post_steps": 16,
        "reveal_steps": 32,
        "entropy_budget": 0.1,
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' must be \"LORA\""),
        ({"r": 0}, "r=0 must be an integer of at least 1"),
        ({"r": 8}, "o_proj.lora_A is F32 [4, 128], but by this model ... [8, 128]"),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf must be a finite number above 0"),
        ({"rank_pattern": {"layers.0.self_attn.o_proj": "4"}}, "rank_pattern="),
        ({"alpha_pattern": {"layers.0.self_attn.o_proj": 9}}, "alpha_pattern must be left out"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] must be left out"),
    ],
    ids=str,
)
def test_draft_lora_settings(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Wrong settings of the draft adapter are refused where the adapter is used, and only there."""
    folder = tiny.nemotron().save(tmp_path)
    path = folder / "linear_spec_lora" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    message = refusal(folder, **setting(**LINEAR_SPEC))
    for part in [*words.split(" ... "), "remove it to draft with the plain weights"]:
        assert part in message
    configure(folder)


def test_draft_lora_tensors(tmp_path: Path, vllm_log: pytest.LogCaptureFixture) -> None:
    """A missing, unknown or misshapen tensor of the draft adapter, or a bad file, is named."""
    folder = tiny.nemotron().save(tmp_path)
    path = folder / "linear_spec_lora" / "adapter_model.safetensors"
    tensors = load_file(path)
    first = "base_model.model.encoder.layers.0.self_attn.o_proj.lora_A.weight"
    module = "encoder.layers.0.self_attn.o_proj"
    other = first.replace("o_proj", "q_proj")
    changes: dict[str, dict[str, Any]] = {
        f"{module} has no lora_A": {n: value for n, value in tensors.items() if n != first},
        f"nothing for {module}": {n: value for n, value in tensors.items() if module not in n},
        module.replace("o_proj", "q_proj"): tensors | {other: tensors[first].clone()},
        f"{module}.lora_A is": tensors | {first: tensors[first][:, :-1].clone()},
        "not finite": tensors | {first: tensors[first] / 0},
    }
    for name, held in changes.items():
        save_file(held, path, metadata={"format": "pt"})
        assert name in refusal(folder, **setting(**LINEAR_SPEC))
    path.write_bytes(b"nothing")
    assert "is truncated or not a safetensors file" in refusal(folder, **setting(**LINEAR_SPEC))
    path.unlink()
    assert "has no adapter_model.safetensors" in refusal(folder, **setting(**LINEAR_SPEC))
    os.mkfifo(path)
    assert "adapter_model.safetensors, which is a named pipe" in refusal(
        folder, **setting(**LINEAR_SPEC)
    )
    path.unlink()
    # Without the folder the plain weights draft.
    (folder / "linear_spec_lora" / "adapter_config.json").unlink()
    vllm_log.set_level("INFO", "vllm")
    configure(folder, **setting(**LINEAR_SPEC))
    assert "so the plain weights draft" in vllm_log.text


def test_unknown_architectures_of_others(tmp_path: Path) -> None:
    """A model of another family fails as it does without this package."""
    tiny.sdar().save(tmp_path)
    changed(tmp_path, architectures=["NewForCausalLM"], model_type="qwen3")
    assert "vllm-diffusion" not in (message := refusal(tmp_path))
    assert "docs/use/families.md" not in message


AS_CAUSAL = {"hf_overrides": {"architectures": ["Qwen3ForCausalLM"]}}


@pytest.mark.parametrize("sign", ["use_regular_causal", "adapter", "block_size"])
def test_causal_weights_of_sdars_architecture(sign: str, tmp_path: Path) -> None:
    """I-DLM and Uno, which have SDAR's architecture, are refused with a remedy for vLLM."""
    tiny.sdar().save(tmp_path)
    options: dict[str, Any] = {}
    if sign == "adapter":
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    elif sign == "block_size":
        changed(tmp_path, block_size=7)
        options = {"max_model_len": 252}
    else:
        changed(tmp_path, use_regular_causal=True)
    message = refusal(tmp_path, **options)
    assert sign in message
    assert "I-DLM" in message
    assert """--hf-overrides '{"architectures": ["Qwen3ForCausalLM"]}'""" in message
    config = configure(tmp_path, **options, **AS_CAUSAL)
    assert config.model_config.architecture == "Qwen3ForCausalLM"
    assert not config.model_config.is_diffusion


def test_an_mdlm_by_name(tmp_path: Path) -> None:
    """An MDLM with the fields of a BD3LM is recognized by its name."""
    folder = tiny.a2d().save(tmp_path / "Qwen3-0.6B-diffusion-mdlm-v0.1")
    assert """--hf-overrides '{"architectures": ["A2DQwen3MDLM"]}'""" in refusal(folder)
    served = configure(folder, hf_overrides={"architectures": ["A2DQwen3MDLM"]}).model_config
    assert served.diffusion.spec.layout.recomputes
    assert configure(tiny.a2d().save(tmp_path / "bd3lm")).model_config.is_diffusion


def test_no_mask_token_id(tmp_path: Path) -> None:
    """A file that names no mask token is refused with the one that was taken, and served with the
    operator's.
    """
    folder = changed(tiny.sdar().save(tmp_path), mask_token_id=None)
    message = refusal(folder)
    assert "names no mask_token_id, and that of the published model, 151669, is not" in message
    assert """--hf-overrides '{"mask_token_id": N}'""" in message
    own = configure(folder, hf_overrides={"mask_token_id": MASK_ID})
    assert own.model_config.diffusion.spec.mask_token_id == MASK_ID


@pytest.mark.parametrize(
    ("files", "named"),
    [
        # As the shipped tokenizer has it: in tokenizer.json alone.
        ({}, '"<mask>", which is 4'),
        ({"tokenizer_config.json": {"mask_token": {"content": "<mask>"}}}, '"<mask>", which is 4'),
        ({"tokenizer_config.json": {"mask_token": None}}, None),
        ({"tokenizer_config.json": {"mask_token": "<none>"}}, None),
        ({"tokenizer_config.json": {"mask_token": ["<mask>"]}}, None),
        (
            {
                "tokenizer_config.json": {"mask_token": None},
                "special_tokens_map.json": {"mask_token": "<mask>"},
            },
            '"<mask>", which is 4',
        ),
        (
            {
                "tokenizer_config.json": {
                    "mask_token": "<|M|>",
                    "added_tokens_decoder": {"9": {"content": "<|M|>"}},
                }
            },
            '"<|M|>", which is 9',
        ),
        (
            {
                "tokenizer_config.json": {"mask_token": "<M>"},
                "added_tokens.json": {"<M>": 8},
            },
            '"<M>", which is 8',
        ),
        ({"tokenizer_config.json": {"mask_token": "<M>"}, "added_tokens.json": {"<M>": 7}}, None),
    ],
)
def test_mask_of_the_tokenizer(
    files: dict[str, Any], named: str | None, tmp_path: Path, start_log: pytest.LogCaptureFixture
) -> None:
    """A start warns if the tokenizer's mask token, in whichever file, is not the model's."""
    folder = shutil.copytree(shipped_checkpoint("sdar"), tmp_path / "sdar")
    changed(folder, mask_token_id=7)
    for name, values in files.items():
        path = folder / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | values))
    configure(folder)
    lines = [line for line in start_log.messages if "the tokenizer's mask token" in line]
    assert len(lines) == bool(named)
    if named:
        assert "mask_token_id=7 of config.json is not" in lines[0]
        assert named.replace('"', "'") in lines[0]
    start_log.clear()
    configure(shipped_checkpoint("sdar"))
    assert "the tokenizer's mask token" not in start_log.text


def test_an_sdar_of_other_blocks(tmp_path: Path) -> None:
    """An SDAR of other blocks is served if the operator declares it as one."""
    changed(tiny.sdar().save(tmp_path), block_size=6, use_regular_causal=False)
    config = configure(tmp_path, max_model_len=252, **setting(rule="reveal"))
    assert config.model_config.diffusion.spec.length == 6


@pytest.mark.parametrize(
    "family",
    [
        # One for each way in which canvases lie.
        pytest.param(name, marks=() if name in ("sdar", "nemotron", "llada") else pytest.mark.slow)
        for name in CASES
        # Its files are A2D's.
        if not name.startswith("mdlm")
    ],
)
def test_tensors(family: str, tmp_path: Path) -> None:
    """A missing or misshapen tensor is named; one of a part that is not served is left out."""
    CASES[family].make().save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    ends = ("input_layernorm.weight", "attn_norm.weight")
    norm = next(name for name in tensors if name.endswith(ends))
    head = next(name for name in tensors if "head" in name or "transformer.ff_out" in name)
    changes: dict[str, dict[str, Any]] = {
        norm: {name: value for name, value in tensors.items() if name != norm},
        head: tensors | {head: tensors[head][:-1].clone()},
    }
    with one_rank():
        for name, held in changes.items():
            save_file(held, path, metadata={"format": "pt"})
            with pytest.raises(ValueError, match=re.escape(name)):
                load(tmp_path)
        save_file(
            tensors | {"model.surplus.weight": torch.ones(2)}, path, metadata={"format": "pt"}
        )
        load(tmp_path)


BLOCKS = masked_spec(8)
MOVED_TOKENS = masked_spec(
    8, rule=Levenshtein(4, delete_token_id=DELETE_ID, split_token_id=SPLIT_ID)
)


@pytest.mark.parametrize(
    ("field", "value", "spec"),
    [
        ("diffusion_reveal_threshold", 1.5, BLOCKS),
        ("diffusion_strategy", "leftmost", BLOCKS),
        ("diffusion_entropy_budget", -0.1, BLOCKS),
        ("diffusion_entropy_budget", "0.1", BLOCKS),
        ("diffusion_strategy", "random", BLOCKS),
        ("diffusion_strategy", 1, BLOCKS),
        ("diffusion_entropy_bound", 0.1, BLOCKS),
        ("diffusion_preset", "fast", BLOCKS),
        ("diffusion_canvas_length", 3, BLOCKS),
        ("diffusion_max_steps", 0, BLOCKS),
        # No position of a block predicts the next one.
        ("prompt_logprobs", 1, BLOCKS),
        # They wait at the position that a token was drawn at, where it may be no more.
        ("logprobs", 1, MOVED_TOKENS),
        ("logprob_token_ids", [5], MOVED_TOKENS),
    ],
)
def test_arguments_of_a_request(field: str, value: Any, spec: CanvasSpec) -> None:
    """A wrong argument of a request gets a 400 with the field's name."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from tests.support.engines.admission import checked

    given = {"extra_args": {field: value}} if field.startswith("diffusion") else {field: value}
    with pytest.raises(VLLMValidationError, match=field) as raised:
        checked(SamplingParams(**given), spec, shipped_checkpoint("sdar"))
    assert raised.value.parameter == field


FAST_DLLM = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("family", "generation", "options", "words"),
    [
        ("fast_dllm", FAST_DLLM, {}, ["temperature=0.7 (0.0)", "repetition_penalty=1.05 (1.0)"]),
        # What the operator sets needs no line.
        (
            "fast_dllm",
            FAST_DLLM,
            {
                "generation_config": "vllm",
                "override_generation_config": {"temperature": 0.0},
                "additional_config": {"diffusion": {"reveal_threshold": 1.0}},
            },
            [],
        ),
        (
            "sdar",
            {"temperature": 0.6},
            {},
            ["temperature=0.6 (1.0)", "--generation-config vllm gives"],
        ),
        ("sdar", {"temperature": 0.6}, {"generation_config": "vllm"}, []),
        ("sdar", {"reveal_threshold": 0.9}, {}, ["reveal_threshold=0.9 (0.85)"]),
        ("stable_diffcoder", {"temperature": 0.0}, {}, []),
    ],
)
def test_what_a_request_gets(
    family: str,
    generation: dict[str, Any],
    options: dict[str, Any],
    words: list[str],
    tmp_path: Path,
    start_log: pytest.LogCaptureFixture,
) -> None:
    """A log line names how a default request differs from the published loop, with the remedy."""
    model = getattr(tiny, family)()
    model.generation_config |= generation
    configure(model.save(tmp_path), **options)
    lines = [line for line in start_log.messages if "A request that sets nothing gets" in line]
    assert len(lines) == bool(words)
    assert all(word in lines[0] for word in words)


@pytest.mark.parametrize(
    ("model", "generation", "settings", "words"),
    [
        ("sdar_32", {}, {}, []),
        ("llada2", {}, {}, []),
        ("sdar_32", {"reveal_threshold": 1.0}, {}, ["reveal_threshold=1.0", "0.9"]),
        (
            "sdar_32",
            {"strategy": "static"},
            {},
            ["strategy='static'", '"dynamic"}', "32 positions"],
        ),
        ("sdar_32", {"strategy": "entropy"}, {}, ["strategy='entropy'", '"dynamic"}']),
        (
            "nemotron",
            {"strategy": "sequential", "reveal_threshold": 1.0},
            {},
            [
                "strategy='sequential' and reveal_threshold=1.0",
                '"dynamic", "reveal_threshold": 0.9',
            ],
        ),
        (
            "sdar_32",
            {"strategy": "entropy_budget", "entropy_budget": 0},
            {},
            ["entropy_budget=0", '"entropy_budget": 0.1'],
        ),
        ("sdar_32", {"strategy": "entropy_budget"}, {}, []),
        ("sdar_32", {"strategy": "static", "max_denoising_steps": 16}, {}, []),
        # LLaDA2.2's masks are revealed over its reveal_steps, whatever its step cap.
        ("llada2_2", {"strategy": "static"}, {}, ["strategy='static'"]),
        ("llada2_2", {"strategy": "static", "reveal_steps": 8}, {}, []),
        # The operator's own choice.
        ("sdar_32", {}, {"strategy": "static"}, []),
        ("sdar_32", {"reveal_threshold": 1.0}, {"reveal_threshold": 1.0}, []),
        ("sdar_32", {"reveal_threshold": 1.0}, {"max_denoising_steps": 8}, []),
    ],
)
def test_one_token_a_pass(
    model: str,
    generation: dict[str, Any],
    settings: dict[str, Any],
    words: list[str],
    tmp_path: Path,
    start_log: pytest.LogCaptureFixture,
) -> None:
    """Settings that decide a single token per pass are reported with better ones."""
    checkpoint = MODELS[model]()
    checkpoint.generation_config |= generation
    configure(checkpoint.save(tmp_path), additional_config={"diffusion": settings})
    lines = [r for r in start_log.records if "one token a pass" in r.getMessage()]
    assert len(lines) == bool(words)
    assert all(r.levelname == "WARNING" for r in lines)
    assert all(word in lines[0].getMessage() for word in words)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("LLaDA2.0-mini", {}, ["rule='reveal' (LLaDA2.0's loop)", '"rule": "reveal_and_edit"']),
        ("LLaDA2.1-mini", {}, ["rule='reveal_and_edit' (LLaDA2.1's loop)", '"rule": "reveal"']),
        ("model", setting(rule="reveal_and_edit"), ["rule='reveal_and_edit' (LLaDA2.1's loop)"]),
        ("LLaDA2.2-flash", {}, ["LLaDA2.2", "SGLang", "docs/use/families.md"]),
    ],
)
def test_llada2_says_its_rule(
    name: str,
    options: dict[str, Any],
    words: list[str],
    tmp_path: Path,
    start_log: pytest.LogCaptureFixture,
) -> None:
    """A log line names the version whose loop runs and how to choose the other; 2.2 warns."""
    is_2_2 = "2.2" in name
    configure((llada2_2 if is_2_2 else llada2)().save(tmp_path / name), **options)
    (record,) = [each for each in start_log.records if each.message.startswith("rule=")]
    assert record.levelname == ("WARNING" if is_2_2 else "INFO")
    for word in words:
        assert word in record.message
