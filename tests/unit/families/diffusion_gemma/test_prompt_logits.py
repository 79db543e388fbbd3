"""vLLM requests prompt logits for 1,024 rows at once, which its memory profile does not count."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.oracles.kernel_checks import TensorMemory
from vllm_diffusion.families.diffusion_gemma.model import DiffusionGemmaForBlockDiffusion

pytestmark = pytest.mark.engine


def test_logits_are_held_once_in_float32():
    """At its peak the memory holds float32 logits once, with the product they are made from."""
    hidden, head = torch.randn(7, 8).bfloat16() * 30, torch.randn(8, 50).bfloat16()
    model = SimpleNamespace(
        logits_processor=lambda weights, rows: rows @ weights, lm_head=head, softcap=30.0
    )
    with TensorMemory() as memory:
        logits = DiffusionGemmaForBlockDiffusion.compute_logits(model, hidden)
    # Beside them, the product before it is made float32.
    assert memory.peak <= logits.nbytes + logits.bfloat16().nbytes
    assert torch.equal(logits, torch.tanh((hidden @ head).float() / 30.0) * 30.0)
