"""Tests of the bytes of a pass against sums by hand from the shapes of the 26B checkpoint."""

import json
from pathlib import Path

import memory_limit
import pytest

BENCHMARKS = Path(memory_limit.__file__).parent
HIDDEN, INNER, VOCAB = 2816, 704, 262144
SLIDING, FULL = 25, 5
# Attention of a sliding layer (q, k, v, o) and of a full one (q, k, o), and a dense MLP.
ATTENTION = SLIDING * HIDDEN * 256 * (16 + 8 + 8 + 16) + FULL * HIDDEN * 512 * (16 + 2 + 16)
MLP = 30 * 3 * HIDDEN * 2112
EXPERT = 3 * HIDDEN * INNER
# A layer's norms (7 of the hidden size, 2 of the head's), router and scalar; and the last norm.
ROUTERS = 30 * (128 * HIDDEN + HIDDEN + 128)
NORMS = 30 * 7 * HIDDEN + SLIDING * 2 * 256 + FULL * 2 * 512 + 30 + HIDDEN
CONDITIONING = 3 * HIDDEN * 2112 + HIDDEN
KV = 1024


@pytest.fixture(scope="module")
def config():
    from transformers import DiffusionGemmaConfig

    return DiffusionGemmaConfig.from_dict(json.loads((BENCHMARKS / "configs/26b.json").read_text()))


def test_bf16(config):
    """A BF16 pass counts two bytes for each number, and only the chosen experts."""
    touched = 57.5
    size = memory_limit.pass_bytes(config, None, touched_experts=touched, context=4096)
    assert size.dense == 2 * (ATTENTION + MLP + ROUTERS + NORMS)
    assert size.experts == 2 * 30 * touched * EXPERT
    assert size.head == 2 * VOCAB * HIDDEN
    assert size.self_conditioning == 2 * CONDITIONING
    # Sliding layers read their window.
    assert size.kv_cache == 2 * 2 * (SLIDING * 8 * 256 * KV + FULL * 2 * 512 * 4096)
    assert size.total == sum(
        (size.dense, size.experts, size.head, size.self_conditioning, size.kv_cache)
    )
