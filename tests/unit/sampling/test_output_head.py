"""Which heads a tile can be cut from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_diffusion.sampling.output_head import OutputHead, head_of


def test_a_quantised_head_is_refused():
    """With the name of what quantises it, and what to do."""
    lm_head = SimpleNamespace(quant_method=SimpleNamespace())
    with pytest.raises(ValueError, match="add lm_head to the ignore list"):
        OutputHead.of(lm_head, None, softcap=None, dtype=None)


def test_scaled_logits_are_refused():
    model = SimpleNamespace(logits_processor=SimpleNamespace(scale=0.5))
    with pytest.raises(ValueError, match="scales its logits"):
        head_of(model)
