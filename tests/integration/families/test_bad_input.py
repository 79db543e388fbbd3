"""What a masked family cannot serve is refused by name, before a weight is read or at the door."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.families import model as tiny
from tests.support.families.llada2_model import DELETE_ID, SPLIT_ID, llada2, llada2_2
from tests.support.specs import masked_spec
from vllm_diffusion.decoding.levenshtein import Levenshtein

pytestmark = pytest.mark.engine


def refusal(folder: Path, **options: Any) -> str:
    """What start-up says."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"max_model_len": 256, "enforce_eager": True} | options
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        EngineArgs(model=str(folder), **arguments).create_engine_config()
    return str(raised.value)


def configured(folder: Path, **options: Any) -> Any:
    """vLLM's configuration, which nothing refuses."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"max_model_len": 256, "enforce_eager": True} | options
    return EngineArgs(model=str(folder), **arguments).create_engine_config()


def changed(folder: Path, **values: Any) -> Path:
    """The folder with other values in ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize("mask", [999, -1, "4", True])
def test_mask_outside_the_vocabulary(mask: Any, tmp_path: Path) -> None:
    """Named with its value and the vocabulary's size."""
    message = refusal(changed(tiny.sdar().save(tmp_path), mask_token_id=mask))
    assert f"mask_token_id={mask!r}" in message
    assert "vocab_size=320" in message


def test_experts_of_a_dense_model(tmp_path: Path) -> None:
    """There is nothing to divide."""
    message = refusal(tiny.sdar().save(tmp_path), enable_expert_parallel=True)
    assert "--enable-expert-parallel divides experts, and this model has none" in message


@pytest.mark.parametrize("length", [0, -4, "4", 2.5, True])
def test_block_length(length: Any, tmp_path: Path) -> None:
    """Under the name that config.json has for it."""
    message = refusal(changed(tiny.sdar().save(tmp_path), block_size=length))
    assert f"block_size={length!r} in config.json" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 250}, ["max_model_len=250", "blocks of 32", "--max-model-len to 224"]),
        ({"block_size": 16}, ["--block-size 16", "blocks of 32", "set it to 32"]),
        ({"rule": "entropy_bound"}, ["rule='entropy_bound'", '"reveal"']),
        ({"reveal_threshold": 1.5}, ["reveal_threshold=1.5 must be a number of at least 0"]),
        ({"strategy": "random"}, ["strategy='random' must be one of dynamic, static, sequential"]),
        ({"entropy_bound": 0.1}, ["entropy_bound is not known", "reveal_threshold"]),
        ({"preset": "fast"}, ["preset='fast' is not known", "this model has none"]),
        ({"max_denoising_steps": 0}, ["max_denoising_steps=0"]),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    """An option of vLLM's or a setting, with the remedy."""
    if not options.keys() & {"max_model_len", "block_size"}:
        options = {"additional_config": {"diffusion": options}}
    message = refusal(tiny.sdar(block_length=32).save(tmp_path), **options)
    for word in words:
        assert word in message


def test_fused_encode_of_a_seeded_family(tmp_path: Path) -> None:
    """Nothing can be denoised before the pass that gives its first token."""
    settings = {"diffusion": {"fused_encode": True}}
    message = refusal(tiny.nemotron().save(tmp_path), additional_config=settings)
    assert "fused_encode cannot be true: this model's canvases begin with a token" in message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"expert_capacity": 3}, ["expert_capacity=3", "num_experts_per_tok=4", "num_experts=16"]),
        ({"expert_capacity": 17}, ["expert_capacity=17"]),
        ({"expert_capacity": "8"}, ["expert_capacity='8'"]),
        ({"delete_token_id": None}, ["delete_token_id=None", "vocab_size=320"]),
        ({"delete_token_id": 320}, ["delete_token_id=320", "vocab_size=320"]),
        ({"split_token_id": "319"}, ["split_token_id='319'"]),
        ({"split_token_id": True}, ["split_token_id=True"]),
    ],
    ids=str,
)
def test_what_llada2_2_needs(values: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    """Its experts of a block, and the tokens by which it edits."""
    message = refusal(changed(llada2_2().save(tmp_path), **values))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("version", "rule", "words"),
    [
        ("2.0", "levenshtein", ['rule="levenshtein"', "has no expert_capacity"]),
        ("2.2", "reveal_and_edit", ["rule='reveal_and_edit'", "deletes and splits"]),
        ("2.2", "reveal", ["rule='reveal'", "deletes and splits"]),
    ],
)
def test_rules_of_llada2(version: str, rule: str, words: list[str], tmp_path: Path) -> None:
    """2.2's own, and no other's."""
    folder = (llada2_2 if version == "2.2" else llada2)().save(tmp_path)
    message = refusal(folder, additional_config={"diffusion": {"rule": rule}})
    for word in words:
        assert word in message


def test_blocks_of_llada2_2(tmp_path: Path) -> None:
    """Experts are chosen by the checkpoint's blocks."""
    folder = llada2_2().save(tmp_path)
    message = refusal(folder, diffusion_config={"canvas_length": 64})
    assert "canvas_length=64 must be 32" in message


def test_llada2_2_is_told_by_its_capacity(tmp_path: Path) -> None:
    """Rule and published settings, whatever the folder is called."""
    from vllm.engine.arg_utils import EngineArgs

    folder = llada2_2().save(tmp_path / "LLaDA2.1-renamed")
    arguments = EngineArgs(model=str(folder), max_model_len=256, enforce_eager=True)
    spec = arguments.create_engine_config().model_config.canvas_spec
    assert isinstance(spec.rule, Levenshtein)
    assert (spec.rule.delete_token_id, spec.rule.split_token_id) == (DELETE_ID, SPLIT_ID)
    assert spec.max_denoising_steps == 1000
    assert spec.settings == {
        "reveal_threshold": 0.5,
        "strategy": "dynamic",
        "editing_threshold": 0.0,
        "max_post_steps": 16,
        "reveal_steps": 32,
    }


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        (
            {"rule": "linear"},
            {},
            ["rule='linear'", '"reveal" or "linear_spec" or "autoregressive"'],
        ),
        ({"rule": "autoregressive", "reveal_threshold": 0.5}, {}, ["reveal_threshold does not go"]),
        (
            {"rule": "autoregressive"},
            {"diffusion_config": {"canvas_length": 8}},
            ["--diffusion-co"],
        ),
        (
            {"rule": "linear_spec", "max_denoising_steps": 4},
            {},
            ["max_denoising_steps=4", "one step"],
        ),
        ({"rule": "linear_spec", "reveal_threshold": 0.5}, {}, ["reveal_threshold is not known"]),
        ({"rule": "linear_spec", "fused_encode": True}, {}, ["fused_encode cannot be true"]),
    ],
    ids=str,
)
def test_rules_of_nemotron(
    settings: dict[str, Any], options: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    """What a rule does not know is named."""
    folder = tiny.nemotron().save(tmp_path)
    message = refusal(folder, additional_config={"diffusion": settings}, **options)
    for word in words:
        assert word in message


def test_a_family_without_an_autoregressive_mode(tmp_path: Path) -> None:
    """Its rules are named, and that is none of them."""
    settings = {"diffusion": {"rule": "autoregressive"}}
    message = refusal(tiny.sdar().save(tmp_path), additional_config=settings)
    assert (
        "rule='autoregressive' is not known for this model; leave it out or set it to \"reveal\"."
        in (message)
    )


LINEAR_SPEC: dict[str, Any] = {"additional_config": {"diffusion": {"rule": "linear_spec"}}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, ["peft_type='IA3' must be \"LORA\""]),
        ({"r": 0}, ["r=0 must be an integer of at least 1"]),
        ({"r": "4"}, ["r='4' must be an integer"]),
        ({"r": 8}, ["o_proj.lora_A is F32 [4, 128], but by this model", "[8, 128]"]),
        ({"lora_alpha": None}, ["lora_alpha=None must be a finite number above 0"]),
        ({"lora_alpha": float("inf")}, ["lora_alpha=inf must be a finite number above 0"]),
        ({"bias": "all"}, ["bias='all' must be \"none\""]),
        ({"use_dora": True}, ["use_dora=True must be left out"]),
        ({"rank_pattern": {"layers.0.self_attn.o_proj": "4"}}, ["rank_pattern="]),
        ({"alpha_pattern": {"layers.0.self_attn.o_proj": 9}}, ["alpha_pattern must be left out"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save=['lm_head'] must be left out"]),
    ],
    ids=str,
)
def test_draft_lora_settings(values: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    """Of the adapter's file, and only where it is used."""
    folder = tiny.nemotron().save(tmp_path)
    path = folder / "linear_spec_lora" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    message = refusal(folder, **LINEAR_SPEC)
    for word in [*words, "remove it to draft with the plain weights"]:
        assert word in message
    configured(folder)


def test_draft_lora_tensors(tmp_path: Path) -> None:
    """Missing, unknown and misshapen ones are named, and a file that is none."""
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
        assert name in refusal(folder, **LINEAR_SPEC)
    path.write_bytes(b"nothing")
    assert "is truncated or not a safetensors file" in refusal(folder, **LINEAR_SPEC)
    path.unlink()
    assert "has no adapter_model.safetensors" in refusal(folder, **LINEAR_SPEC)
    os.mkfifo(path)
    assert "adapter_model.safetensors, which is a named pipe" in refusal(folder, **LINEAR_SPEC)
    path.unlink()
    # Without the folder the plain weights draft.
    (folder / "linear_spec_lora" / "adapter_config.json").unlink()
    assert configured(folder, **LINEAR_SPEC).model_config.draft_lora is None


@pytest.mark.parametrize("architecture", ["DreamModel", "LLaDAModelLM"])
def test_families_without_an_exact_cache(architecture: str, tmp_path: Path) -> None:
    """Refused by name with the reason, though no code of theirs is here."""
    model_type = {"DreamModel": "Dream", "LLaDAModelLM": "llada"}[architecture]
    tiny.sdar().save(tmp_path)
    changed(tmp_path, architectures=[architecture], model_type=model_type, block_size=None)
    assert "no cache of them is exact" in refusal(tmp_path)


@pytest.mark.parametrize("architecture", ["DreamForCausalLM", "DreamModel"])
def test_blocks_of_dreams_model_type(architecture: str, tmp_path: Path) -> None:
    """DreamReasoner-8B is told by its blocks, and not taken for Dream-7B."""
    tiny.sdar().save(tmp_path)
    changed(tmp_path, architectures=[architecture], model_type="Dream", block_size=32)
    message = refusal(tmp_path)
    assert "DreamReasoner-8B" in message
    assert "block_size=32" in message
    assert "SDAR-8B-Chat" in message
    assert "no cache of them is exact" not in message


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("sdar", ["SDARForCausalLM alone is served", '{"architectures": ["SDARForCausalLM"]}']),
        ("nemotron_labs_diffusion", ["NemotronLabsDiffusionModel alone is served"]),
        ("llada", ["of which none is served", "docs/use/families.md"]),
    ],
)
def test_unknown_architectures(model_type: str, words: list[str], tmp_path: Path) -> None:
    """One that only shares a family's ``model_type`` is named, with what would serve it."""
    tiny.sdar().save(tmp_path)
    changed(tmp_path, architectures=["NewForCausalLM"], model_type=model_type)
    message = refusal(tmp_path)
    assert f"model_type={model_type!r} with architectures=['NewForCausalLM']" in message
    for word in words:
        assert word in message


def test_unknown_architectures_of_others(tmp_path: Path) -> None:
    """What is not of our families fails as it does without us."""
    tiny.sdar().save(tmp_path)
    changed(tmp_path, architectures=["NewForCausalLM"], model_type="qwen3")
    assert "vllm-diffusion" not in (message := refusal(tmp_path))
    assert "docs/use/families.md" not in message


AS_CAUSAL = {"hf_overrides": {"architectures": ["Qwen3ForCausalLM"]}}


@pytest.mark.parametrize("sign", ["use_regular_causal", "adapter", "block_size"])
def test_causal_weights_of_sdars_architecture(sign: str, tmp_path: Path) -> None:
    """I-DLM and Uno are refused by what they have and SDAR has not; vLLM serves them by the remedy."""
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
    config = configured(tmp_path, **options, **AS_CAUSAL)
    assert config.model_config.architecture == "Qwen3ForCausalLM"
    assert not config.model_config.is_diffusion


def test_an_sdar_of_other_blocks(tmp_path: Path) -> None:
    """Served where the operator says that it is one."""
    changed(tiny.sdar().save(tmp_path), block_size=6, use_regular_causal=False)
    rule = {"additional_config": {"diffusion": {"rule": "reveal"}}}
    config = configured(tmp_path, max_model_len=252, **rule)
    assert config.model_config.canvas_spec.length == 6


@pytest.mark.parametrize("family", ["sdar", "nemotron", "fast_dllm", "stable_diffcoder", "llada2"])
def test_tensors(family: str, tmp_path: Path) -> None:
    """Missing, unknown and misshapen ones are named."""
    (llada2() if family == "llada2" else getattr(tiny, family)()).save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = next(name for name in tensors if name.endswith("input_layernorm.weight"))
    head = next(name for name in tensors if "head" in name)
    changes: dict[str, dict[str, Any]] = {
        norm: {name: value for name, value in tensors.items() if name != norm},
        "model.surplus.weight": tensors | {"model.surplus.weight": tensors[norm].clone()},
        head: tensors | {head: tensors[head][:-1].clone()},
    }
    for name, held in changes.items():
        save_file(held, path, metadata={"format": "pt"})
        assert name in refusal(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"diffusion_reveal_threshold": 1.5}, "diffusion_reveal_threshold"),
        ({"diffusion_strategy": "random"}, "diffusion_strategy"),
        ({"diffusion_strategy": 1}, "diffusion_strategy"),
        ({"diffusion_entropy_bound": 0.1}, "diffusion_entropy_bound"),
        ({"diffusion_preset": "fast"}, "diffusion_preset"),
        ({"diffusion_canvas_length": 3}, "diffusion_canvas_length"),
        ({"diffusion_max_steps": 0}, "diffusion_max_steps"),
    ],
    ids=str,
)
def test_arguments_of_a_request(arguments: dict[str, Any], field: str) -> None:
    """A 400 with the field's name."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_diffusion.requests.validation import validate_diffusion_arguments

    with pytest.raises(VLLMValidationError, match=field) as raised:
        validate_diffusion_arguments(SamplingParams(extra_args=arguments), masked_spec(8), 320)
    assert raised.value.parameter == field


def test_prompt_log_probabilities(tmp_path: Path) -> None:
    """No position of a block predicts the next one."""
    from types import SimpleNamespace

    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_diffusion.requests.validation import validate_sampling_params

    model_config = SimpleNamespace(
        is_diffusion=True, canvas_spec=masked_spec(8), get_vocab_size=lambda: 320
    )
    with pytest.raises(VLLMValidationError, match="prompt_logprobs"):
        validate_sampling_params(SamplingParams(prompt_logprobs=1), model_config)


@pytest.mark.parametrize("arguments", [{"logprobs": 1}, {"logprob_token_ids": [5]}], ids=str)
def test_log_probabilities_of_a_rule_that_moves_tokens(arguments: dict[str, Any]) -> None:
    """They wait at the position that a token was drawn at, where it may be no more."""
    from types import SimpleNamespace

    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_diffusion.requests.validation import validate_sampling_params

    rule = Levenshtein(4, delete_token_id=DELETE_ID, split_token_id=SPLIT_ID)
    model_config = SimpleNamespace(
        is_diffusion=True, canvas_spec=masked_spec(8, rule=rule), get_vocab_size=lambda: 320
    )
    (field,) = arguments
    with pytest.raises(VLLMValidationError, match=f"{field} is not supported") as raised:
        validate_sampling_params(SamplingParams(**arguments), model_config)
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
    """One line says where a request that sets nothing differs from the published loop, and the remedy."""
    model = getattr(tiny, family)()
    model.generation_config |= generation
    configured(model.save(tmp_path), **options)
    lines = [line for line in start_log.messages if "A request that sets nothing gets" in line]
    assert len(lines) == bool(words)
    assert all(word in lines[0] for word in words)


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("LLaDA2.0-mini", None, ["rule='reveal' (LLaDA2.0's loop)", '"rule": "reveal_and_edit"']),
        ("LLaDA2.1-mini", None, ["rule='reveal_and_edit' (LLaDA2.1's loop)", '"rule": "reveal"']),
        ("model", "reveal_and_edit", ["rule='reveal_and_edit' (LLaDA2.1's loop)"]),
        ("LLaDA2.2-flash", None, ["LLaDA2.2", "SGLang", "docs/use/families.md"]),
    ],
)
def test_llada2_says_its_rule(
    name: str,
    rule: str | None,
    words: list[str],
    tmp_path: Path,
    start_log: pytest.LogCaptureFixture,
) -> None:
    """A line says which version's loop runs, and how to have the other; 2.2's is a warning."""
    version = "2.2" if "2.2" in name else "2.0"
    settings = {} if rule is None else {"additional_config": {"diffusion": {"rule": rule}}}
    configured((llada2_2 if version == "2.2" else llada2)().save(tmp_path / name), **settings)
    (record,) = [each for each in start_log.records if each.message.startswith("rule=")]
    assert record.levelname == ("WARNING" if version == "2.2" else "INFO")
    for word in words:
        assert word in record.message
