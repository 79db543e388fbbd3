"""Starts read from published drafts what their files say, and so do the presets."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.test_published_files import config_of
from tests.support.families.published import (
    ExpectedDraft,
    PublishedFiles,
    expected_drafts,
    published_files,
)
from vllm_diffusion.drafting.draft_fields import (
    block_size_of,
    check_fields,
    stock_mask_token,
    stock_target_layers,
)
from vllm_diffusion.drafting.presets import presets
from vllm_diffusion.drafting.reference_draft import reach_of_layer

pytestmark = pytest.mark.engine

DRAFTS = {draft.id: draft for draft in expected_drafts()}
ALL = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)


def field_of(config: dict[str, Any], path: str) -> Any:
    """Return a field of a file by its name, with its section before a dot."""
    value: Any = config
    for name in path.split("."):
        value = value[name]
    return value


def target_of(draft: ExpectedDraft, folder: Path) -> Path:
    """Write a target of the sizes that the draft was made for."""
    config = draft.files.config
    sizes = config.get("transformer_layer_config", config)
    last = max(draft.values["target_layers"])
    made = folder / "target"
    made.mkdir()
    target = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": config.get("num_target_layers", last + 2),
        "hidden_size": sizes["hidden_size"],
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    } | ({"vocab_size": sizes["vocab_size"]} if "vocab_size" in sizes else {})
    (made / "config.json").write_text(json.dumps(target))
    return made


def started(draft: ExpectedDraft, folder: Path, changes: dict[str, Any] | None = None) -> Any:
    """Return vLLM's configuration of a target with the draft."""
    completed = draft.completed if changes is None else changes
    files = {"config.json": draft.files.config | completed}
    speculation = {
        "method": draft.method,
        "model": str(PublishedFiles(draft.id, "", files, {}).write(folder)),
        # A block of DFlash begins with an anchor, where nothing is proposed.
        "num_speculative_tokens": draft.values.get("block", 8) - (draft.method == "dflash"),
    }
    return config_of(target_of(draft, folder), speculative_config=speculation)


def read_by_us(draft: Any, layout: str) -> dict[str, Any]:
    """Return what the package reads of a draft's configuration, by the names of the table."""
    _, layers, first = stock_target_layers(draft)
    read: dict[str, Any] = {
        "block": block_size_of(draft),
        "mask": stock_mask_token(draft)[1],
        "layers": getattr(draft, "num_hidden_layers", None),
        "target_layers": [layer - first for layer in layers or ()],
    }
    if layout == "dflash" and read["layers"]:
        reaches = [reach_of_layer(draft, layer) for layer in range(read["layers"])]
        windows = {window for window, _ in reaches if window is not None}
        assert len(windows) <= 1
        read["window"] = max(windows, default=None)
        read["causal"] = sum(is_causal for _, is_causal in reaches)
    return read


def test_every_draft_is_in_the_table() -> None:
    """No published file of a draft is held to nothing."""
    found = {files.id for files in published_files() if "dflash" in files.id.lower()}
    assert found == set(DRAFTS)


@ALL
def test_the_table_is_the_files(draft: ExpectedDraft) -> None:
    """Each value of the table is the content of the field that is named as its source."""
    config = draft.files.config
    for name in {"block", "mask", "layers", "window"} & draft.values.keys():
        assert draft.values[name] == field_of(config, draft.sources[name]), name
    if "target_layers" in draft.values:
        source = draft.sources["target_layers"]
        first = int("aux_hidden_state" in source)
        listed = [layer - first for layer in field_of(config, source)]
        assert draft.values["target_layers"] == listed
        assert listed == config.get("dflash_config", {}).get("target_layer_ids", listed)
    if "causal" in draft.values:
        value = field_of(config, draft.sources["causal"])
        sliding = value.count("sliding_attention") if isinstance(value, list) else None
        layers = draft.values["layers"]
        assert draft.values["causal"] == (layers * value if sliding is None else sliding)


@ALL
def test_what_is_read(
    draft: ExpectedDraft, tmp_path: Path, start_log: pytest.LogCaptureFixture
) -> None:
    """A start with the draft reads what its file says, and warns of nothing in it."""
    if draft.starts:
        speculation = started(draft, tmp_path).speculative_config
        config = speculation.draft_model_config.hf_config
        architectures = speculation.draft_model_config.architectures
        assert architectures == draft.files.config.get("architectures", architectures)
    else:
        config = SimpleNamespace(**draft.files.config)
        check_fields(config, draft.id)
    read = read_by_us(config, draft.method if draft.starts else "")
    if "speculators_model_type" in draft.files.config:
        # vLLM keeps none of the file's own names.
        read["block"] = block_size_of(SimpleNamespace(**draft.files.config))
    assert {name: read[name] for name in draft.values} == dict(draft.values)
    if draft.values.get("causal") == 0 and "window" not in draft.values:
        assert read["window"] is None
    assert not [
        record.getMessage()
        for record in start_log.records
        if record.levelname == "WARNING" and draft.id in record.getMessage()
    ]


def test_a_window_without_its_flag(tmp_path: Path) -> None:
    """A draft whose window transformers drops is refused by the flag that it lacks."""
    draft = DRAFTS["z-lab/Qwen3.6-27B-DFlash"]
    with pytest.raises(ValueError, match=r"sliding_window=None .* use_sliding_window=true"):
        started(draft, tmp_path, {})


PRESETS = [preset for preset in presets() if preset.draft in DRAFTS]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.draft)
def test_presets_are_the_files(preset: Any) -> None:
    """What a preset says of a draft is in its file, and what the file says is in the preset."""
    draft = DRAFTS[preset.draft]
    values = draft.values
    assert preset.target == draft.target
    assert preset.block == values.get("block", preset.block)
    if "causal" in values:
        causal, layers = values["causal"], values["layers"]
        said = "no layer" if causal == 0 else f"{causal} layers of {layers}"
        assert preset.causal.startswith(said)
        window = f"{values['window']} in " if "window" in values else "none"
        assert preset.window.startswith(window)
    if {"block", "causal"} & values.keys():
        assert any("config.json" in source for source in preset.sources)
