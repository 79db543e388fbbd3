"""What the campaign is expected to measure on an H100, from counts, written down before any GPU ran it.

A pass takes, for its layers, its attention and its head, the longer of what memory needs for their bytes
and what tensor cores need for their products. Expected of an H100 (SXM, NVIDIA's data sheet: 3.35 TB/s,
989 TFLOP/s in BF16, 1,979 in FP8) are 0.9 of its memory and 0.6 of its tensor cores; launches are in
graphs and count nothing, and neither does the host. Experts are chosen at random, as random weights
choose them. Attention is compared by what its loop takes a key (the compiled kernels of gpu-figures.md).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memory_limit import pass_bytes
from records import read_table
from transformers import DiffusionGemmaConfig

BENCHMARKS = Path(__file__).resolve().parents[1]
MEMORY = 0.9 * 3.35e12
BF16 = 0.6 * 989e12
FP8 = 2 * BF16
# Tokens of a prompt that a pass takes.
BUDGET = 16384
# What stock moves of a logit: 8 bytes that it holds, each written once and read three times.
STOCK_LOGIT_BYTES = 32


@dataclass(frozen=True)
class Shape:
    """Weights and attention of a model.

    Attributes:
        dense: Parameters of the layers that every row meets.
        expert: Parameters of one expert of every layer; 0 without experts.
        experts: Experts of a layer.
        top_k: Experts that a row meets.
        group: Rows that choose together, a block of LLaDA2.2; 1 where each row chooses.
        chosen: Experts that such rows choose.
        head: Parameters of the projection onto the vocabulary.
        vocab: Tokens.
        head_products: Products of a row with the head: the soft embeddings' is the second one.
        weight_bytes: Bytes of a parameter of the layers.
        keys: (query heads times head size, bytes of a token's keys and values, window) of each layer.
    """

    dense: float
    expert: float
    experts: int
    top_k: int
    group: int
    chosen: int
    head: float
    vocab: int
    head_products: int
    weight_bytes: float
    keys: list[tuple[int, int, float]]

    def pass_seconds(
        self, rows: int, requests: int, context: int, *, sampled: bool = True
    ) -> float:
        """Time of a pass.

        Args:
            rows: Rows of all requests.
            requests: Number of requests, which share no keys.
            context: Tokens that each request's rows attend to.
            sampled: True if all rows meet the head; false in a pass of a prompt.
        """
        touched = 0.0
        if self.experts:
            missed = (1 - self.chosen / self.experts) ** max(1, rows / self.group)
            touched = self.experts * (1 - missed)
        read = self.weight_bytes * (self.dense + self.expert * touched)
        rate = FP8 if self.weight_bytes < 2 else BF16
        layers = max(read / MEMORY, 2 * rows * (self.dense + self.expert * self.top_k) / rate)
        attention = 0.0
        for width, kv_bytes, window in self.keys:
            seen = min(context, window)
            attention += max(requests * kv_bytes * seen / MEMORY, 4 * rows * width * seen / BF16)
        head = max(2 * self.head / MEMORY, 2 * rows * self.head / BF16) * self.head_products
        return layers + attention + head * sampled

    def prefill_seconds(self, prompt: int) -> float:
        """Time of all passes of a prompt, whose rows see half of it on average."""
        ends = range(0, prompt, BUDGET)
        return sum(
            self.pass_seconds(
                min(BUDGET, prompt - begin),
                1,
                begin + min(BUDGET, prompt - begin) // 2,
                sampled=False,
            )
            for begin in ends
        )


@dataclass(frozen=True)
class Serving:
    """Requests of a workload.

    Attributes:
        shape: The model.
        canvas: Tokens of a canvas.
        steps: Denoise steps of a canvas.
        prompt: Tokens of a prompt.
        answer: Tokens of an answer.
    """

    shape: Shape
    canvas: int
    steps: int
    prompt: int
    answer: int

    def pass_ms(self, requests: int = 1) -> float:
        """Milliseconds of a pass in which every request denoises."""
        context = self.prompt + self.answer // 2
        return 1e3 * self.shape.pass_seconds(requests * self.canvas, requests, context)

    def first_ms(self) -> float:
        """Milliseconds from a request that is alone to its first canvas."""
        return 1e3 * self.shape.prefill_seconds(self.prompt) + self.steps * self.pass_ms()

    def tokens_a_second(
        self, requests: int, passes: int | None = None, sampler: float = 0
    ) -> float:
        """Tokens a second of all requests.

        Args:
            requests: Requests at once.
            passes: Passes of a canvas; ``None`` for one a step.
            sampler: Seconds that sampling a request's canvas takes beyond ours.
        """
        canvases = self.answer / self.canvas
        pass_seconds = self.pass_ms(requests) / 1e3 + requests * sampler
        seconds = requests * self.shape.prefill_seconds(self.prompt)
        return requests * self.answer / (seconds + canvases * (passes or self.steps) * pass_seconds)

    def over_stock(self, requests: int) -> float:
        """Tokens a second over stock's: a pass more for a canvas, and its logits in memory."""
        sampler = self.canvas * self.shape.vocab * STOCK_LOGIT_BYTES / MEMORY
        return self.tokens_a_second(requests) / self.tokens_a_second(
            requests, self.steps + 1, sampler
        )


def diffusion_gemma() -> Shape:
    """DiffusionGemma-26B with FP8 weights."""
    settings = _settings("diffusion-gemma-26b-fp8")
    settings.pop("quantization_config")
    config = DiffusionGemmaConfig.from_dict(settings)
    text = config.text_config
    size = pass_bytes(config, None, touched_experts=1, context=0)
    keys = []
    for layer, kind in enumerate(text.layer_types):
        shape = text.per_layer_config[layer]
        window = math.inf if kind == "full_attention" else text.sliding_window
        kv_bytes = 4 * shape.num_key_value_heads * shape.head_dim
        keys.append((text.num_attention_heads * shape.head_dim, kv_bytes, window))
    return Shape(
        dense=(size.dense + size.self_conditioning) / 2,
        expert=size.experts / 2,
        experts=text.num_experts,
        top_k=text.top_k_experts,
        group=1,
        chosen=text.top_k_experts,
        head=size.head / 2,
        vocab=text.vocab_size,
        head_products=2,
        weight_bytes=1,
        keys=keys,
    )


def transformer(name: str) -> Shape:
    """A Qwen3 or LLaDA2 body in BF16, whose ``config.json`` is a folder of ``configs/``."""
    config = _settings(name)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = heads * config["head_dim"]
    kv_width = 2 * kv_heads * config["head_dim"]
    attention = hidden * (2 * width + kv_width)
    experts = config.get("num_experts", 0)
    dense_layers = config["first_k_dense_replace"] if experts else layers
    mlp = 3 * hidden * config["intermediate_size"]
    expert = 3 * hidden * config.get("moe_intermediate_size", 0)
    routed = layers - dense_layers
    shared = config.get("num_shared_experts", 0) * expert + hidden * experts
    return Shape(
        dense=layers * attention + dense_layers * mlp + routed * shared,
        expert=routed * expert,
        experts=experts,
        top_k=(top_k := config.get("num_experts_per_tok", 0)),
        group=config["block_size"] if "expert_capacity" in config else 1,
        chosen=config.get("expert_capacity", top_k),
        head=hidden * config["vocab_size"],
        vocab=config["vocab_size"],
        head_products=1,
        weight_bytes=2,
        keys=[(width, 2 * kv_width, math.inf)] * layers,
    )


def attention_over_ours(layer: str, whose: str) -> float | None:
    """A peer's time of a key over ours on SM90; ``None`` where it was not compiled."""
    cycles = {
        # The slower of issuing its instructions and of its products.
        row["whose"]: max(float(row["issue cycles"]), float(row["tensor-core cycles"]))
        for row in read_table("compiled")
        if (row["chip"], row["kernel of"]) == ("sm_90", f"attention, {layer}")
    }
    return cycles[whose] / cycles["ours"] if whose in cycles else None


def with_draft_over_without(block: int = 16) -> float:
    """Tokens a second of Qwen3-8B's shape with a draft of which nothing is accepted, over without one."""
    target, draft = transformer("qwen3-8b"), transformer("qwen3-8b-dflash")
    alone = target.pass_seconds(1, 1, 1536)
    return alone / (target.pass_seconds(block, 1, 1536) + draft.pass_seconds(block, 1, 1536))


def _settings(name: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / "configs" / name / "config.json").read_text(encoding="utf-8"))


GEMMA = Serving(diffusion_gemma(), canvas=256, steps=16, prompt=4096, answer=1024)
LLADA = Serving(transformer("llada2.1-mini"), canvas=32, steps=8, prompt=1024, answer=1024)
SDAR = Serving(transformer("sdar-8b"), canvas=4, steps=2, prompt=1024, answer=1024)
LONG_PROMPTS = (8192, 32768, 122000)


def long_prompt(tokens: int) -> Serving:
    """LLaDA2.2's shape with one block behind a prompt."""
    return Serving(transformer("llada2.2-mini"), canvas=32, steps=8, prompt=tokens, answer=32)


# A chat: DiffusionGemma's ways are compared at it.
CHAT = Serving(diffusion_gemma(), canvas=256, steps=16, prompt=1024, answer=512)


def by_way(requests: int, draft_length: int = 8, kept: float = 4) -> dict[str, float]:
    """Tokens a second of DiffusionGemma-26B's three ways of decoding, by rule, without the prompts' passes.

    A draft takes a step and a pass that verifies it. What it keeps is not known; soft embeddings, the head's
    second product, are of denoise steps alone.

    Args:
        requests: Requests at once.
        draft_length: Rows of a request in both passes of a draft.
        kept: Tokens that a verification keeps.
    """
    context = CHAT.prompt + CHAT.answer // 2
    causal = replace(CHAT.shape, head_products=1)
    one = causal.pass_seconds(requests, requests, context)
    rows = requests * draft_length
    drafted = CHAT.shape.pass_seconds(rows, requests, context)
    verified = causal.pass_seconds(rows, requests, context)
    denoised = CHAT.steps * CHAT.pass_ms(requests) / 1e3
    return {
        "entropy_bound": requests * CHAT.canvas / denoised,
        "autoregressive": requests / one,
        "linear_spec": requests * kept / (drafted + verified),
    }
