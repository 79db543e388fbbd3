"""Where the model runner hands over to our sampler: hidden rows, not logits.

The runner would project every row onto the whole vocabulary first and write a grammar's mask into
the result. Our sampler projects for itself, a tile at a time, and takes masks from the scheduler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_diffusion.replacement import replace
from vllm_diffusion.sampling.sampler import DiffusionSampler


def install() -> None:
    """Replace three methods where the sampler is a :class:`DiffusionSampler`, and nowhere else.

    Safe to call twice.
    """
    replace(GPUModelRunner, "sample", _sampling_hidden_rows)
    replace(GPUModelRunner, "_dummy_sampler_run", _profiling_hidden_rows)
    replace(GPUModelRunner, "capture_model", _dropping_profiled_graphs)


def _sampling_hidden_rows(stock: Any) -> Any:
    def sample(self: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        if not isinstance(self.sampler, DiffusionSampler):
            return stock(self, hidden_states, input_batch, grammar_output)
        # Asked next for what leaves the device beside tokens.
        self.aux_output_connector = self.sampler.views
        rows, batch, seeding = self.sampler.select_rows(hidden_states, input_batch)
        output = self.sampler(rows, batch, grammar_output, seeding)
        return output, output.num_sampled, output.num_rejected

    return sample


def _profiling_hidden_rows(stock: Any) -> Any:
    @torch.inference_mode()
    def profile(self: Any, hidden_states: Tensor) -> None:
        if not isinstance(self.sampler, DiffusionSampler):
            stock(self, hidden_states)
        else:
            self.sampler.profile(hidden_states)

    return profile


def _dropping_profiled_graphs(stock: Any) -> Any:
    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        size: int = stock(self, profile_only=profile_only)
        if profile_only and isinstance(self.sampler, DiffusionSampler):
            # vLLM has measured what graphs take and drops its own.
            self.model_state.drop_graphs()
        return size

    return capture_model
