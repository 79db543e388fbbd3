"""Diffusion models that nobody serves are refused by name, and what looks like one is reported."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import makers as tiny
from vllm_diffusion.runner.model_state import BlockDiffusionModelState
from vllm_diffusion.startup.unserved_models import unserved_models

pytestmark = pytest.mark.engine

CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model


class OtherConfig(Qwen3Config):
    model_type = "other"


class OtherModel(Qwen3Model):
    config_class = OtherConfig


class {name}(Qwen3ForCausalLM):
    config_class = OtherConfig
"""
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 64}


def checkpoint(folder: Path, name: str, **fields: Any) -> str:
    """Write a checkpoint whose class is its repository's own code, on a Qwen3."""
    code = {"AutoConfig": "other.OtherConfig", "AutoModel": "other.OtherModel"}
    code["AutoModelForCausalLM"] = f"other.{name}"
    config = {"architectures": [name], "model_type": "other", "auto_map": code, **SIZES, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "other.py").write_text(CODE.format(name=name))
    return str(folder)


def configure(model: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model, trust_remote_code=True, skip_tokenizer_init=True, load_format="dummy"
    ).create_model_config()


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep code of repositories apart from that of other tests."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code")
    )


CLASSES = [(name, each) for name, classes in unserved_models().items() for each in classes]


@pytest.mark.parametrize(("name", "architecture"), CLASSES)
def test_a_model_that_nobody_serves(name: str, architecture: str, tmp_path: Path) -> None:
    """A known class of remote code, which vLLM would write token after token, is refused."""
    with pytest.raises(ValueError, match=f"{name} is a diffusion model that neither vLLM nor"):
        configure(checkpoint(tmp_path, architecture, mask_token_id=7, block_size=4))


@pytest.mark.parametrize(
    ("fields", "sign"),
    [
        ({"mask_token_id": 7, "block_size": 4}, "a mask token and a block"),
        ({"diffusion_steps": 8}, "diffusion_steps"),
        ({"mask_token_id": 7}, ""),
        ({"block_size": 4}, ""),
    ],
    ids=str,
)
def test_what_looks_like_one(
    fields: dict[str, Any], sign: str, tmp_path: Path, vllm_log: pytest.LogCaptureFixture
) -> None:
    """One line warns of a class that may be a diffusion model, and of no other is anything said."""
    configure(checkpoint(tmp_path, "OtherForCausalLM", **fields))
    said = [line for line in vllm_log.messages if "looks like that of a diffusion model" in line]
    assert len(said) == bool(sign)
    assert all(f"({sign})" in line for line in said)


def test_a_model_of_vllm(tmp_path: Path, vllm_log: pytest.LogCaptureFixture) -> None:
    """Of a class that vLLM has itself nothing is said, whatever fields its file has."""
    fields = {"model_type": "qwen3", "mask_token_id": 7, "block_size": 4}
    folder = checkpoint(tmp_path, "Qwen3ForCausalLM", **fields)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert configure(folder).architecture == "Qwen3ForCausalLM"
    assert not any("diffusion model" in line for line in vllm_log.messages)


def test_family_without_start_up_checks(tmp_path: Path) -> None:
    """A family without start-up checks, which vLLM's scheduler would run wrongly, is refused."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class MaskedLlamaForTests(LlamaForCausalLM):
        @staticmethod
        def get_model_state_cls() -> type:
            return BlockDiffusionModelState

    ModelRegistry.register_model("MaskedLlamaForTests", MaskedLlamaForTests)
    family = tiny.stable_diffcoder
    architecture = {"architectures": ["MaskedLlamaForTests"]}
    family = replace(family, config=family.config | architecture, block_length_key=None)
    with pytest.raises(ValueError, match="MaskedLlamaForTests has no start-up checks"):
        LLM(
            str(family().save(tmp_path)),
            diffusion_config={"canvas_length": 8},
            async_scheduling=False,
            max_model_len=128,
            enforce_eager=True,
            kv_cache_memory_bytes=16 * 1024**2,
        )
    cleanup_dist_env_and_memory()
