"""Where the model runner hands over to our sampler: hidden rows, not logits.

The runner would project every row onto the whole vocabulary first and write a grammar's mask into
the result. Our sampler projects for itself, a tile at a time, and takes masks from the scheduler.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_diffusion.sampling.sampler import DiffusionSampler

_MARK = "_hands_hidden_rows_to_diffusion_samplers"


def install() -> None:
    """Replace three methods where the sampler is a :class:`DiffusionSampler`, and nowhere else.

    Safe to call twice.
    """
    stock_sample, stock_profile = GPUModelRunner.sample, GPUModelRunner._dummy_sampler_run
    stock_capture = GPUModelRunner.capture_model
    if getattr(stock_sample, _MARK, False):
        return

    @functools.wraps(stock_sample)
    def sample(self: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        if not isinstance(self.sampler, DiffusionSampler):
            return stock_sample(self, hidden_states, input_batch, grammar_output)
        rows = hidden_states[input_batch.logits_indices]
        output = self.sampler(rows, input_batch, grammar_output)
        return output, output.num_sampled, output.num_rejected

    @functools.wraps(stock_profile)
    @torch.inference_mode()
    def profile(self: Any, hidden_states: Tensor) -> None:
        if not isinstance(self.sampler, DiffusionSampler):
            stock_profile(self, hidden_states)
        else:
            self.sampler.profile(hidden_states)

    @functools.wraps(stock_capture)
    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        size = stock_capture(self, profile_only=profile_only)
        if profile_only and isinstance(self.sampler, DiffusionSampler):
            # vLLM has measured what graphs take and drops its own.
            self.model_state.drop_graphs()
        return size

    setattr(sample, _MARK, True)
    GPUModelRunner.capture_model = capture_model
    GPUModelRunner.sample = sample
    GPUModelRunner._dummy_sampler_run = profile
