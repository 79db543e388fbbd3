"""LLaDA's class and loop, from the checkouts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.publishers import checkout, modules_of, without_mask
from tests.support.families.model import TinyModel


def model_and_loop(toy: TinyModel) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """The publisher's class with a toy's weights, which draws no mask, and its ``generate``."""
    load = modules_of(checkout("dllm") / "dllm/pipelines/llada/models", "publisher_llada")
    generate = modules_of(checkout("LLaDA"), "publisher_llada_loop")("generate").generate
    classes, modelling = load("configuration_llada"), load("modeling_llada")
    own = ("architectures", "auto_map", "model_type", "torch_dtype")
    config = classes.LLaDAConfig(
        **{name: value for name, value in toy.config.items() if name not in own}
    )
    layers = modelling.create_model_config_from_pretrained_config(config)
    layers.init_device = "cpu"
    body = modelling.LLaDAModelLM(config, modelling.LLaDAModel(layers, init_params=False))
    body = body.float().eval()
    # Which transformers 5 keeps of no class by itself.
    body.config.use_cache = False
    body.load_state_dict(toy.tensors())

    def model(ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        output = body(ids)
        return output.__class__(logits=without_mask(output.logits))

    model.device = torch.device("cpu")  # type: ignore[attr-defined]
    return model, generate
