"""The default number of requests, in an engine: its slots take what the estimate says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.checkpoints import SHIPPED
from tests.support.engine import TracedEngine
from vllm_diffusion.startup.request_capacity import slot_bytes

pytestmark = pytest.mark.engine


def rows_of(owner: Any, num_slots: int, seen: dict[int, torch.Tensor], depth: int = 3) -> None:
    """Tensors with a row for each slot, in ``owner`` and what it consists of."""
    values = vars(owner).values() if hasattr(owner, "__dict__") else owner
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dim() > 0 and value.shape[0] == num_slots:
                seen[value.data_ptr()] = value
        elif depth and (isinstance(value, tuple) or type(value).__module__.startswith("vllm")):
            rows_of(value, num_slots, seen, depth - 1)


def test_slots_of_an_engine():
    """As many requests run at once as leave prompts a quarter of a pass, and a slot's tensors are those counted."""
    engine = TracedEngine(SHIPPED, max_num_seqs=None, max_num_batched_tokens=25 * 32)
    try:
        assert engine.scheduler.max_num_running_reqs == 19
        prompts = [[20 + i] * 5 for i in range(19)]
        engine.generate(prompts, seeds=list(range(19)), max_tokens=8)

        seen: dict[int, torch.Tensor] = {}
        runner = engine.runner
        for owner in (engine.state, runner.sampler, runner.req_states):
            rows_of(owner, 19, seen)
        # In host memory on a GPU, and of the model's length.
        del seen[runner.req_states.all_token_ids.gpu.data_ptr()]
        held = sum(tensor.nbytes for tensor in seen.values())
        config = engine.llm.llm_engine.vllm_config.model_config
        counted = 19 * slot_bytes(
            canvas_length=engine.slots.canvas_length,
            hidden_size=config.hf_text_config.hidden_size,
            vocab_size=config.get_vocab_size(),
            dtype_bytes=config.dtype.itemsize,
        )
        assert 0.8 * held < counted < 1.25 * held
    finally:
        engine.close()
