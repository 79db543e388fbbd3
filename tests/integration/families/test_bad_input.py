"""What a masked family cannot serve is refused by name, before loading or at the request."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines.refused import refusal, refusal_of_row, rows_of
from tests.support.engines.vllm_configs import configure
from tests.support.families import makers as tiny
from tests.support.families.llada2_model import DELETE_ID, SPLIT_ID, llada2, llada2_2
from tests.support.families.mineru_model import mineru
from tests.support.families.model import MASK_ID, VOCAB_SIZE, TinyModel
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.specs import diffusion_gemma_spec, masked_spec
from vllm_diffusion.checkpoints import shipped_checkpoint
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
    "fast_dllm": tiny.fast_dllm,
    "stable_diffcoder": tiny.stable_diffcoder,
    "llada": tiny.llada,
    "llada_moe": tiny.llada_moe,
    "llada2": llada2,
    "llada2_2": llada2_2,
    "mineru": mineru,
    "nemotron": tiny.nemotron,
    "uno": tiny.uno,
}


@pytest.mark.parametrize("row", rows_of(__file__, "refused"))
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


def test_draft_lora(tmp_path: Path, start_log: pytest.LogCaptureFixture) -> None:
    """The draft adapter is checked as any adapter, for each layer's tensors and one scale, where it
    is used and only there; without it the plain weights draft.
    """
    folder = tiny.nemotron().save(tmp_path)
    config, weights = (
        folder / "linear_spec_lora" / name
        for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    own, tensors = json.loads(config.read_text()), load_file(weights)
    module = "encoder.layers.0.self_attn.o_proj"
    for values, left_out, words in (
        ({"r": 0}, "nothing", "r=0 must be an integer of at least 1"),
        ({"alpha_pattern": {module: 9}}, "nothing", "alpha_pattern must be left out"),
        ({}, f"{module}.lora_A", f"{module} has no lora_A"),
        ({}, module, f"nothing for {module}"),
    ):
        config.write_text(json.dumps(own | values))
        held = {name: value for name, value in tensors.items() if left_out not in name}
        save_file(held, weights, metadata={"format": "pt"})
        message = refusal(folder, **setting(**LINEAR_SPEC))
        assert words in message
        assert "give another in draft_adapter" in message
        configure(folder)
    config.unlink()
    configure(folder, **setting(**LINEAR_SPEC))
    assert "so the plain weights draft" in start_log.text


def test_unknown_architectures_of_others(tmp_path: Path) -> None:
    """A model of another family fails as it does without this package."""
    tiny.sdar().save(tmp_path)
    changed(tmp_path, architectures=["NewForCausalLM"], model_type="qwen3")
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        configure(tmp_path)
    assert "vllm-diffusion" not in str(raised.value)
    assert "docs/use/families.md" not in str(raised.value)


AS_CAUSAL = {"hf_overrides": {"architectures": ["Qwen3ForCausalLM"]}}


def test_uno_is_told_by_its_adapter(tmp_path: Path, start_log: pytest.LogCaptureFixture) -> None:
    """SDAR's class with an adapter of drafts beside it is Uno, whose adapter may lie elsewhere;
    without one there are no drafts, and the message says how to serve it.
    """
    own = configure(tiny.uno().save(tmp_path / "own")).model_config
    assert own.architecture == "UnoQwen3ForCausalLM"
    assert own.diffusion.spec.length == 9
    assert own.diffusion.spec.noise_tokens == range(1, tiny.uno.config["mask_token_id"])
    (line,) = [one for one in start_log.records if "with which the model drafts" in one.message]
    assert line.levelname == "WARNING"
    assert '--hf-overrides with "architectures" chooses another class' in line.message
    assert "(rank 4, scale 16) acts on drafts" in start_log.text

    elsewhere = (tmp_path / "own" / "adapter").rename(tmp_path / "elsewhere")
    uno = {"hf_overrides": {"architectures": ["UnoQwen3ForCausalLM"]}}
    message = refusal(tmp_path / "own", **uno)
    assert "draft_adapter" in message
    assert '"rule": "autoregressive"' in message
    configure(tmp_path / "own", **uno, **setting(draft_adapter=str(elsewhere), draft_length=17))
    assert f"the LoRA {elsewhere}" in start_log.text
    configure(tmp_path / "own", **uno, **setting(rule="autoregressive"))
    assert "draft_adapter" in refusal(tmp_path / "own", **setting(draft_adapter=str(elsewhere)))


def test_uno_on_k2_horizon(tmp_path: Path, start_log: pytest.LogCaptureFixture) -> None:
    """Its adapter lies elsewhere, and random tokens are of the whole vocabulary.

    Models for which no adapter was trained are refused, and with partly rotated heads adapters of
    requests, which vLLM would add to other channels.
    """
    model = tiny.uno_k2()
    folder = model.save(tmp_path / "base")
    elsewhere = setting(draft_adapter=str((folder / "adapter").rename(tmp_path / "elsewhere")))
    found = configure(folder, **model.options, **elsewhere).model_config
    assert found.architecture == "UnoK2HorizonForCausalLM"
    assert found.diffusion.spec.noise_tokens == range(1, VOCAB_SIZE)
    assert f"the LoRA {tmp_path / 'elsewhere'}" in start_log.text
    # Without the operator's word it is vLLM's own model.
    plain = configure(folder, trust_remote_code=True).model_config
    assert plain.architecture == "K2HorizonForCausalLM"
    assert not hasattr(plain, "diffusion")

    adapters = {"enable_lora": True}
    assert "rope_head_dim=16" in refusal(folder, **model.options, **elsewhere, **adapters)
    for name, value in (("num_experts", 8), ("attention_gate_func", "silu")):
        of_folder = changed(shutil.copytree(folder, tmp_path / name), **{name: value})
        assert f"{name}={value!r}" in refusal(of_folder, **model.options, **elsewhere)
    whole = changed(folder, rope_head_dim=None)
    configure(whole, **model.options, **elsewhere, **adapters)


@pytest.mark.parametrize("sign", ["use_regular_causal", "block_size"])
def test_causal_weights_of_sdars_architecture(sign: str, tmp_path: Path) -> None:
    """I-DLM, which has SDAR's architecture, is refused with a remedy for vLLM."""
    tiny.sdar().save(tmp_path)
    options: dict[str, Any] = {}
    if sign == "block_size":
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


@pytest.mark.parametrize("row", rows_of(__file__, "masks"))
def test_mask_of_the_tokenizer(
    row: dict[str, Any], tmp_path: Path, start_log: pytest.LogCaptureFixture
) -> None:
    """A start warns if the tokenizer's mask token, in whichever file, is not the model's."""
    folder = shutil.copytree(shipped_checkpoint("sdar"), tmp_path / "sdar")
    changed(folder, mask_token_id=7)
    for name in row.keys() - {"says"}:
        path = folder / f"{name}.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        values = {key: value or None for key, value in row[name].items()}
        path.write_text(json.dumps(old | values))
    configure(folder)
    lines = [line for line in start_log.messages if "the tokenizer's mask token" in line]
    assert len(lines) == ("says" in row)
    for line in lines:
        assert "mask_token_id=7 of config.json is not" in line
        assert row["says"] in line
    start_log.clear()
    configure(shipped_checkpoint("sdar"))
    assert "the tokenizer's mask token" not in start_log.text


def test_an_sdar_of_other_blocks(tmp_path: Path) -> None:
    """An SDAR of other blocks is served if the operator declares it as one."""
    changed(tiny.sdar().save(tmp_path), block_size=6, use_regular_causal=False)
    config = configure(tmp_path, max_model_len=252, **setting(rule="reveal"))
    assert config.model_config.diffusion.spec.length == 6


SPECS = {
    "canvases": diffusion_gemma_spec(32),
    "blocks": masked_spec(8),
    "moved tokens": masked_spec(
        8, rule=Levenshtein(4, delete_token_id=DELETE_ID, split_token_id=SPLIT_ID)
    ),
}


@pytest.mark.parametrize("row", rows_of(__file__, "arguments"))
def test_arguments_of_a_request(row: dict[str, Any]) -> None:
    """A wrong argument of a request gets a 400 with the field's name."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from tests.support.engines.admission import checked

    field = next(iter(row["sent"]))
    own = {name: value for name, value in row["sent"].items() if name.startswith("diffusion_")}
    given = {name: value for name, value in row["sent"].items() if name not in own}
    checkpoint = SHIPPED if row["spec"] == "canvases" else shipped_checkpoint("sdar")
    with pytest.raises(VLLMValidationError, match=field) as raised:
        checked(SamplingParams(**given, extra_args=own), SPECS[row["spec"]], checkpoint)
    assert raised.value.parameter == field


@pytest.mark.parametrize("row", rows_of(__file__, "logged"))
def test_logged(row: dict[str, Any], tmp_path: Path, start_log: pytest.LogCaptureFixture) -> None:
    """A start logs one line about each thing of the table that differs, with the remedy, and none
    where the operator chose it.
    """
    checkpoint = MODELS[row["model"]]()
    checkpoint.generation_config |= row.get("generation", {})
    options = row.get("options", {}) | {"additional_config": {"diffusion": row.get("settings", {})}}
    configure(checkpoint.save(tmp_path / row.get("name", "model")), **options)
    records = [record for record in start_log.records if row["about"] in record.getMessage()]
    assert [record.levelname for record in records] == ([row["level"]] if "says" in row else [])
    for record in records:
        assert all(part in record.getMessage() for part in row["says"].split(" ... "))
