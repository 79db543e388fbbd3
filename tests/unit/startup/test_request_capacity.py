"""How many requests run at once by default: what memory carries, and no more than a pass holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.startup import request_capacity
from vllm_diffusion.startup.request_capacity import (
    FEWEST,
    PROMPTS_SHARE,
    Memory,
    RequestCost,
    carried_requests,
    choose_max_num_seqs,
    kv_bytes,
    slot_bytes,
    text_parameters,
)

GIB = 1024**3

# DiffusionGemma-26B-A4B, as published.
TEXT_26B = SimpleNamespace(
    vocab_size=262144,
    hidden_size=2816,
    intermediate_size=2112,
    moe_intermediate_size=704,
    num_experts=128,
    num_attention_heads=16,
    num_hidden_layers=30,
    sliding_window=1024,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5,
    per_layer_config=(
        [SimpleNamespace(num_key_value_heads=8, head_dim=256)] * 5
        + [SimpleNamespace(num_key_value_heads=2, head_dim=512)]
    )
    * 5,
)

sizes = st.integers(1, 2**40)
costs = st.builds(RequestCost, state=st.integers(1, 2**34), kv=st.integers(1, 2**34))
memories = st.builds(
    Memory, free=st.integers(-(2**40), 2**40), kv=st.none() | st.integers(0, 2**40)
)
counts = st.integers(1, 2048)


@given(memory=memories, cost=costs, canvases=counts, most=counts)
def test_choose_max_num_seqs(memory, cost, canvases, most):
    """The number is in range, and the tensors of its slots fit wherever one slot does."""
    chosen = choose_max_num_seqs(memory, cost, canvases, most)
    assert 1 <= chosen <= min(canvases, most)
    assert chosen == 1 or chosen * cost.state <= memory.free
    carried = carried_requests(memory, cost)
    assert chosen <= max(carried, FEWEST)
    if carried <= min(canvases - canvases // PROMPTS_SHARE, most):
        assert chosen >= carried
    if chosen > FEWEST:
        # So much of a pass is left to prompts, however many run.
        assert canvases - chosen >= canvases // PROMPTS_SHARE


@given(memory=memories, cost=costs)
def test_carried_requests_fit(memory, cost):
    """As many as fit, and one more does not."""

    def fits(count: int) -> bool:
        state, kv = count * cost.state, count * cost.kv
        if memory.kv is None:
            return state + kv <= memory.free
        return state <= memory.free and kv <= memory.kv

    carried = carried_requests(memory, cost)
    assert carried == 0 or fits(carried)
    assert not fits(carried + 1)


@given(memory=memories, cost=costs, canvases=counts, most=counts, more=sizes)
def test_more_memory_is_never_fewer_requests(memory, cost, canvases, most, more):
    larger = Memory(memory.free + more, None if memory.kv is None else memory.kv + more)
    fewer = choose_max_num_seqs(memory, cost, canvases, most)
    assert choose_max_num_seqs(larger, cost, canvases, most) >= fewer


def test_sizes_of_the_published_checkpoint():
    """Its 51.65 GB in BF16, most of which is the language model; a slot of a few megabytes."""
    assert 50e9 < 2 * text_parameters(TEXT_26B) < 51.65e9
    state = slot_bytes(canvas_length=256, hidden_size=2816, vocab_size=262144, dtype_bytes=2)
    # Soft embeddings, and vLLM's counts of said tokens.
    assert 256 * 2816 * 2 + 262144 * 4 < state < 3e6


@pytest.mark.parametrize(("tp", "ranks_of_global"), [(1, 1), (2, 2), (4, 2)])
def test_kv_bytes(tp, ranks_of_global):
    """Sliding layers hold a window and two canvases, the others everything; heads are shared."""
    found = kv_bytes(TEXT_26B, context=4096, canvas_length=256, tp=tp, kv_bytes=2)
    sliding = 25 * 2 * 8 * 256 * 2 * (1024 + 2 * 256) // tp
    whole = 5 * 2 * 2 * 512 * 2 * 4096 // ranks_of_global
    assert found == sliding + whole


def test_kv_bytes_of_stages():
    """The stage that takes most counts: the first one has a full-attention layer fewer."""
    given = {"context": 4096, "canvas_length": 256, "tp": 1, "kv_bytes": 2}
    stages = [slice(0, 10), slice(10, 20), slice(20, 30)]
    sliding, whole = 2 * 8 * 256 * 2 * (1024 + 2 * 256), 2 * 2 * 512 * 2 * 4096
    assert kv_bytes(TEXT_26B, **given, stages=stages[:1]) == 9 * sliding + whole
    assert kv_bytes(TEXT_26B, **given, stages=stages) == 8 * sliding + 2 * whole


@pytest.mark.parametrize(
    ("device_gib", "weights_gb", "budget", "expected"),
    [
        pytest.param(139, 27.2, 8192, 24, id="H200-FP8-server"),
        pytest.param(139, 27.2, 16384, 48, id="H200-FP8-offline"),
        pytest.param(79, 51.65, 8192, 24, id="H100-BF16-server"),
        pytest.param(31, 18.82, 2048, 8, id="32GB-NVFP4-server"),
    ],
)
def test_default_of_known_devices(device_gib, weights_gb, budget, expected):
    """The published checkpoints, with vLLM's default memory share and pass sizes."""
    memory = Memory(int(device_gib * GIB * 0.92 - weights_gb * 1e9 - 2 * GIB))
    cost = RequestCost(
        state=slot_bytes(canvas_length=256, hidden_size=2816, vocab_size=262144, dtype_bytes=2),
        kv=kv_bytes(TEXT_26B, context=4096, canvas_length=256, tp=1, kv_bytes=2),
    )
    assert choose_max_num_seqs(memory, cost, budget // 256, 1024) == expected


def test_engines_share_a_machine(monkeypatch):
    """On the CPU each one's requests are chosen from its part of the free memory."""
    import psutil
    import vllm.platforms

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    monkeypatch.setattr(
        vllm.platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: True), raising=False
    )
    monkeypatch.setattr(request_capacity, "weight_bytes", lambda config: 0)
    free = [
        request_capacity._memory(
            SimpleNamespace(
                cache_config=SimpleNamespace(kv_cache_memory_bytes=GIB),
                parallel_config=SimpleNamespace(data_parallel_size_local=engines),
            )
        ).free
        for engines in (1, 2)
    ]
    assert free[0] - free[1] == 50 * GIB
