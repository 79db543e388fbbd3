"""Start-up's rules of tensors, against what was found of the published files."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.families.published_tensors import PUBLISHED, published_tensors
from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.plugin import imported
from vllm_diffusion.weights.tensor_rules import split_experts

pytestmark = pytest.mark.engine

# What a configuration needs besides its sizes, as the published files have it.
_REST: dict[str, dict[str, Any]] = {
    "NemotronLabsDiffusionModel": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "StableDiffcoderForCausalLM": {"model_type": "llama"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_names_and_shapes(name: str) -> None:
    """All of a checkpoint's tensors and no other, two layers deep; experts one by one."""
    from transformers import LlamaConfig

    published = PUBLISHED[name].config | {"num_hidden_layers": 2}
    if "num_experts" in published:
        published["num_experts"] = 8
    architecture = published["architectures"][0]
    family = next(one for one in FAMILIES if one.architecture == architecture)
    config_class = imported(family.config) if family.config else LlamaConfig
    config = config_class(**(published | _REST.get(architecture, {})))
    shapes = split_experts(imported(family.engine_config).tensor_rules().shapes(config))
    assert shapes == published_tensors(published)
