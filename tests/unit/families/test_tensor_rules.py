"""Tests of the rules of tensors at start-up, against tiny checkpoints and published files."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.families.cases import CASES
from tests.support.families.published_files import PUBLISHED
from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.plugin import imported
from vllm_diffusion.weights.tensor_rules import Shape, split_experts

pytestmark = pytest.mark.engine


def shapes_of(config: dict[str, Any]) -> dict[str, Shape]:
    """Return the shapes by the rules for a ``config.json``, with experts one by one."""
    from transformers import LlamaConfig

    family = next(one for one in FAMILIES if one.architecture == config["architectures"][0])
    config_class = imported(family.config) if family.config else LlamaConfig
    rules = imported(family.engine_config).tensor_rules()
    return split_experts(rules.shapes(config_class(**config)))


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes(name: str) -> None:
    """The rules name exactly the tensors of a checkpoint, under the published names."""
    model = CASES[name].make()
    held = {name: tuple(tensor.shape) for name, tensor in model.tensors().items()}
    assert shapes_of(model.config) == held


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    """The rules give the published numbers of tensors, bytes and parameters."""
    published = PUBLISHED[name]
    shapes = shapes_of(published.config)
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    found = (len(shapes), 2 * num_parameters, num_parameters / 1e9)
    known = (published.num_tensors, published.num_bytes, published.billions)
    assert any(known)
    for figure, wanted in zip(found, known, strict=True):
        assert wanted is None or figure == pytest.approx(wanted, rel=0, abs=0.01)


def test_names_of_llada_in_lists_of_modules() -> None:
    """The names in a quantized checkpoint's lists match whole modules, not parts of a name."""
    from vllm_diffusion.families.llada.model import LLaDAModelLM

    blocks = "model.transformer.blocks.3"
    names = {
        "model.transformer.ff_out": "lm_head",
        f"{blocks}.ff_out": "model.layers.3.mlp.down_proj",
        f"{blocks}.attn_out": "model.layers.3.self_attn.o_proj",
        f"{blocks}.ff_proj": "model.layers.3.mlp.gate_proj",
    }
    assert LLaDAModelLM.published_names.apply_list([*names]) == [*names.values()]
