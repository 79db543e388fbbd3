"""Tests of the rules of tensors at start-up, against tiny checkpoints and published files."""

import pytest

from tests.support.families.cases import CASES
from tests.support.families.published import shapes_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes(name: str) -> None:
    """The rules name exactly the tensors of a checkpoint, under the published names."""
    model = CASES[name].make()
    held = {name: tuple(tensor.shape) for name, tensor in model.tensors().items()}
    assert shapes_of(model.config) == held


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
