"""LLaDA's class and loop, from the checkouts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.publishers import checkout, fields_of, modules_of, with_weights, without_mask
from tests.support.families.model import TinyModel


def llada(toy: TinyModel) -> Any:
    """Build the publisher's class of LLaDA with a toy's weights."""
    load = modules_of(checkout("dllm") / "dllm/pipelines/llada/models", "publisher_llada")
    modelling = load("modeling_llada")
    config = load("configuration_llada").LLaDAConfig(**fields_of(toy))
    layers = modelling.create_model_config_from_pretrained_config(config)
    layers.init_device = "cpu"
    body = modelling.LLaDAModelLM(config, modelling.LLaDAModel(layers, init_params=False))
    # Which transformers 5 keeps of no class by itself.
    body.config.use_cache = False
    return with_weights(body, toy)


def model_and_loop(body: Any) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """Return a publisher's model that draws no mask, and the loop of LLaDA's ``generate.py``."""
    generate = modules_of(checkout("LLaDA"), "publisher_llada_loop")("generate").generate

    def model(ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=without_mask(body(ids).logits))

    model.device = torch.device("cpu")  # type: ignore[attr-defined]
    return model, generate
