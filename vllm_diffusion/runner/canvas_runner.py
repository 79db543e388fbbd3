"""vLLM's model runner for canvases: the sampler gets hidden rows.

vLLM's runner would project every row onto the whole vocabulary first and write a grammar's mask
into the result. Our sampler projects for itself, a tile at a time, and takes masks from the
scheduler.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class CanvasRunner(GPUModelRunner):
    """vLLM's model runner for a model whose state has canvases."""

    num_speculative_steps: int
    decode_query_len: int

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        # Read next for what leaves the device with tokens.
        self.aux_output_connector = self.sampler.views
        rows = self.sampler.select_rows(hidden_states)
        output = self.sampler(rows, input_batch, grammar_output)
        return output, output.num_sampled, output.num_rejected

    @contextmanager
    def short_drafts(self) -> Iterator[None]:
        """While vLLM warms up: its requests have six times the draft tokens of a pass, and one.

        Drafts as long as the longest sequence would be written beyond its tensors.
        """
        if self.model_state.spec.layout.has_one_length:
            yield
            return
        own = self.num_speculative_steps, self.decode_query_len
        self.num_speculative_steps = self.decode_query_len = max((self.max_model_len - 1) // 6, 1)
        try:
            yield
        finally:
            self.num_speculative_steps, self.decode_query_len = own

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: Tensor) -> None:
        self.sampler.profile(hidden_states)

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture CUDA graphs; with ``profile_only``, some of them, to measure their memory."""
        if not profile_only:
            size: int = super().capture_model(profile_only=False)
            return size
        graphs = self.model_state.graphs
        with graphs.sample():
            return int(super().capture_model(profile_only=True)) + graphs.bytes_of_others()
