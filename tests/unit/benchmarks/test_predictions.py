"""Predictions of the campaign, against shapes that others count and limits that no pass can beat."""

from __future__ import annotations

import json

import memory_limit
import predictions
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DiffusionGemmaConfig, Qwen3Config

SHAPES = {
    "gemma": predictions.GEMMA.shape,
    "llada2.1": predictions.LLADA.shape,
    "llada2.2": predictions.long_prompt(8192).shape,
    "sdar": predictions.SDAR.shape,
}


def parameters(shape: predictions.Shape) -> float:
    """Parameters of the layers, with all experts."""
    return shape.dense + shape.expert * shape.experts


def test_qwen3_has_the_parameters_that_transformers_counts():
    """Weights without norms, and the projection apart from the embedding."""
    folder = predictions.BENCHMARKS / "configs" / "qwen3-8b"
    config = Qwen3Config.from_dict(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = {name: weight.numel() for name, weight in model.named_parameters()}
    shape = predictions.transformer("qwen3-8b")
    layers = sum(size for name, size in counted.items() if "proj" in name)
    assert shape.dense == layers
    assert shape.head == counted["lm_head.weight"] == counted["model.embed_tokens.weight"]


@pytest.mark.parametrize("context", [1, 1000, 5000])
def test_gemma_reads_the_cache_that_the_limit_of_memory_counts(context):
    """Of sliding layers the window alone."""
    folder = predictions.BENCHMARKS / "configs" / "diffusion-gemma-26b-fp8"
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    text = DiffusionGemmaConfig.from_dict(config).text_config
    read = sum(kv * min(context, window) for _, kv, window in predictions.GEMMA.shape.keys)
    assert read == memory_limit.kv_cache_bytes(text, context, kv_bytes=2)


@pytest.mark.parametrize(
    ("name", "whole", "active"),
    [
        # 16B-A1.4B and 26B-A4B are the names of the checkpoints.
        ("llada2.1", 16e9, 1.4e9),
        ("gemma", 26e9, 4e9),
        ("sdar", 8e9, 8e9),
    ],
)
def test_shapes_have_the_sizes_that_their_names_say(name, whole, active):
    """Within a tenth, of which the names leave out embeddings or not."""
    shape = SHAPES[name]
    embeddings = shape.head * (1 if name == "gemma" else 2)
    assert parameters(shape) + embeddings == pytest.approx(whole, rel=0.1)
    met = shape.dense + shape.expert * shape.top_k
    assert min(abs(met - active), abs(met + embeddings - active)) < 0.15 * active


@given(st.sampled_from(list(SHAPES)), st.integers(1, 64), st.integers(1, 200_000))
def test_no_pass_is_faster_than_memory_or_products_allow(name, requests, context):
    """A pass of more requests takes longer and less a request, and reads its weights at least once."""
    shape = SHAPES[name]
    one = shape.pass_seconds(32, 1, context)
    many = shape.pass_seconds(32 * requests, requests, context)
    assert one <= many * (1 + 1e-9)
    assert many <= requests * one * (1 + 1e-9)
    assert one >= shape.weight_bytes * shape.dense / (0.9 * 3.35e12)
    products = 2 * 32 * requests * (shape.dense + shape.expert * shape.top_k + shape.head)
    assert many >= products / (2 * 0.6 * 989e12)


def test_touched_experts_of_a_block():
    """A block of LLaDA2.2 reads 48 experts of 256 a layer; rows that choose alone read more."""
    by_block, by_row = SHAPES["llada2.2"], SHAPES["llada2.1"]
    assert parameters(by_block) == parameters(by_row)
    assert by_block.pass_seconds(32, 1, 1) < by_row.pass_seconds(32, 1, 1)
    head = 2 * by_block.head / predictions.MEMORY
    layers = by_block.pass_seconds(32, 1, 0) - head
    read = 2 * (by_block.dense + 48 * by_block.expert)
    assert layers == pytest.approx(read / predictions.MEMORY)


def test_peers_without_a_count_have_no_prediction():
    assert predictions.attention_over_ours("sliding", "split-2") is None
    assert predictions.attention_over_ours("full", "FlashAttention-4") == pytest.approx(
        32.0 / 55.12, rel=0.1
    )


def test_ways_of_decoding() -> None:
    """Diffusion leads with few requests, and the causal ways with many; a draft must keep enough."""
    few, many = predictions.by_way(1), predictions.by_way(256)
    assert max(few, key=few.__getitem__) == "entropy_bound"
    assert min(many, key=many.__getitem__) == "entropy_bound"
    # Two passes for a token are more than one.
    useless = predictions.by_way(32, kept=1)
    assert useless["linear_spec"] < useless["autoregressive"]
