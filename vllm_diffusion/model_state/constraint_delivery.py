"""The way of the scheduler's constraints past the model runner to our sampler.

The runner would write a grammar's mask into what ``compute_logits`` returned, which for our models
are hidden rows that the sampler projects itself.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_diffusion.sampling.sampler import DiffusionSampler


def install() -> None:
    """Hand constraints to a :class:`DiffusionSampler`; other samplers notice nothing.

    Safe to call twice.
    """
    stock = GPUModelRunner.sample
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def sample(self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        if isinstance(self.sampler, DiffusionSampler):
            self.sampler.constraints, grammar_output = grammar_output, None
        return stock(self, hidden_states, input_batch, grammar_output)

    GPUModelRunner.sample = sample
