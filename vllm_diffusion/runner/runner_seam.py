"""Changes to vLLM's model runner: the sampler gets hidden rows, and stages exchange canvases.

The runner would project every row onto the whole vocabulary first and write a grammar's mask into
the result. Our sampler projects for itself, a tile at a time, and takes masks from the scheduler.
With pipeline stages the runner would send the other stages one token for each request, and as many
drafts as a drafter has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.hooks.replacement import replaces
from vllm_diffusion.runner.stage_relay import StageRelay
from vllm_diffusion.sampling.sampler import DiffusionSampler


def install() -> None:
    """Replace four methods for a runner whose state has canvases, and for no other.

    Safe to call twice.
    """
    _sampling_hidden_rows.install()
    _profiling_hidden_rows.install()
    _dropping_profiled_graphs.install()
    _relaying_canvases.install()


def _has_canvases(runner: Any) -> bool:
    return isinstance(getattr(runner.model_state, "slots", None), CanvasSlots)


@replaces(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
    reason="Our sampler takes hidden rows; stock projects all of them onto the whole vocabulary.",
    until="A custom sampler may ask for hidden states in place of logits.",
)
def _sampling_hidden_rows(stock: Any) -> Any:
    def sample(self: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        if not isinstance(self.sampler, DiffusionSampler):
            return stock(self, hidden_states, input_batch, grammar_output)
        # Asked next for what leaves the device beside tokens.
        self.aux_output_connector = self.sampler.views
        rows = self.sampler.select_rows(hidden_states)
        output = self.sampler(rows, input_batch, grammar_output)
        return output, output.num_sampled, output.num_rejected

    return sample


@replaces(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_sampler_run",
    reason="Profiles the memory of a sampler that takes hidden rows.",
    until="A custom sampler may ask for hidden states in place of logits.",
)
def _profiling_hidden_rows(stock: Any) -> Any:
    @torch.inference_mode()
    def profile(self: Any, hidden_states: Tensor) -> None:
        if not isinstance(self.sampler, DiffusionSampler):
            stock(self, hidden_states)
        else:
            self.sampler.profile(hidden_states)

    return profile


@replaces(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model",
    reason="Tells our state whether graphs are captured to stay, or for the memory profile only.",
    until="A model state is called before and after graphs are captured, and says what its own take.",
)
def _dropping_profiled_graphs(stock: Any) -> Any:
    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        if not (profile_only and _has_canvases(self)):
            size: int = stock(self, profile_only=profile_only)
            return size
        state = self.model_state
        state.captures_sample = True
        try:
            # vLLM measures what graphs take, of the largest of its own, and drops them.
            return int(stock(self, profile_only=True)) + state.bytes_of_other_graphs()
        finally:
            state.captures_sample = False
            state.drop_graphs()

    return capture_model


@replaces(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_pp_decode_requests",
    reason="Puts our relay in the place of the pipeline's handler, which sends a sampled token a request.",
    until="A model state may provide the pipeline's handler.",
)
def _relaying_canvases(stock: Any) -> Any:
    def update_pp_decode_requests(self: Any) -> None:
        """Install our relay before the stage's first pass; vLLM calls this at the start of each."""
        handler, state = self.pp_handler, self.model_state
        if handler is not None and _has_canvases(self) and not isinstance(handler, StageRelay):
            num_stages = self.parallel_config.pipeline_parallel_size
            self.pp_handler = StageRelay(handler, state.slots, state.soft_embeds, num_stages)
        stock(self)

    return update_pp_decode_requests
