"""A number of ``config.json`` that makes no valid model is named, and every other one passes."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.families.diffusion_gemma.startup import check_config_numbers

TEXT_SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "global_head_dim", "num_global_key_value_heads",
    "num_experts", "top_k_experts", "vocab_size", "sliding_window", "max_position_embeddings",
)  # fmt: skip
VISION_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "patch_size", "pooling_kernel_size", "position_embedding_size",
    "default_output_length",
)  # fmt: skip


def changed(folder: Path, section: str | None, **changes: Any) -> Any:
    """Return the shipped checkpoint's configuration as transformers reads it, with a change."""
    content = json.loads((SHIPPED / "config.json").read_text())
    (content[section] if section else content).update(changes)
    (folder / "config.json").write_text(json.dumps(content))
    return AutoConfig.from_pretrained(folder)


def refusal(config: Any) -> str:
    with pytest.raises(ValueError, match="in config.json of the checkpoint must") as raised:
        check_config_numbers(config)
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("value", [-4, 0, 10**12])
@pytest.mark.parametrize(
    ("section", "key"),
    [
        *(("text_config", key) for key in TEXT_SIZES),
        *(("vision_config", key) for key in VISION_SIZES),
    ],
)
def test_size(section: str, key: str, value: int, tmp_path: Path) -> None:
    """A size below 1, or one whose product with another size overflows, is refused by name."""
    assert f"{section}.{key}" in refusal(changed(tmp_path, section, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"), [("rope_theta", -1.0), ("rope_theta", 0), ("partial_rotary_factor", 2.0)]
)
def test_rotary_embedding(key: str, value: float, tmp_path: Path) -> None:
    """A number of the rotary embedding that makes no valid model is refused by name."""
    config = changed(tmp_path, None)
    config.text_config.rope_parameters["full_attention"][key] = value
    assert f"rope_parameters.full_attention.{key}={value}" in refusal(config)


def test_published_numbers_pass(tmp_path: Path) -> None:
    """The numbers of the shipped checkpoint, and the defaults of real models, are accepted."""
    check_config_numbers(changed(tmp_path, None))
    check_config_numbers(type(AutoConfig.from_pretrained(SHIPPED))())
