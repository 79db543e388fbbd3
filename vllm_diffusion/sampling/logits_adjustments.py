"""What a request asks of the logits themselves, by vLLM's own processors, on the rows of a canvas.

``allowed_token_ids``, ``logit_bias`` and ``min_tokens`` (which masks the end tokens of the positions
before it), the penalties, and processors that the operator loaded. They change every distribution
of a row: the candidate's, the argmax, the entropy and the self-conditioning signal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext


class LogitsAdjustments:
    """vLLM's logits processors, told what a row of a canvas is."""

    def __init__(self, stock_sampler: Any, num_slots: int) -> None:
        # Bad words need the tokens before a position, which in a canvas change from step to step:
        # the scheduler constrains those canvases (vllm_diffusion.scheduling.constrained_canvas).
        self._processors = [
            processor
            for processor in stock_sampler.logits_processors
            if not isinstance(processor, BadWordsState)
        ]
        self._in_use = np.zeros(num_slots, dtype=bool)

    def add_request(self, slot: int, sampling_params: Any) -> None:
        # Every processor is asked, whatever the others said: each keeps its own state.
        answers = [p.add_request(slot, sampling_params) for p in self._processors]
        self._in_use[slot] = any(answers)

    def apply_staged_writes(self) -> None:
        for processor in self._processors:
            processor.apply_staged_writes()

    def apply(self, logits: Tensor, input_batch: InputBatch, chunk: slice) -> Tensor:
        """Adjusted logits of some of the batch's rows.

        Args:
            logits: [num_rows, vocab_size], float32; left as it is.
            input_batch: The batch that ran.
            chunk: Which of its canvas rows these are.

        Returns:
            ``logits`` if no request of the batch asks for anything, else a new tensor like it.
        """
        if not self._in_use[input_batch.idx_mapping_np].any():
            return logits
        rows = input_batch.logits_indices[chunk]
        local_pos = input_batch.expanded_local_pos[chunk]
        context = LogitsContext(
            expanded_idx_mapping=input_batch.expanded_idx_mapping[chunk],
            idx_mapping=input_batch.idx_mapping,
            idx_mapping_np=input_batch.idx_mapping_np,
            # Penalties would count the drafts at the positions before a row's own. A canvas is not
            # text yet, so every row stands at the first position and only committed tokens count.
            expanded_local_pos=torch.zeros_like(local_pos),
            input_ids=input_batch.input_ids[rows],
            # vLLM's rows predict the next position; a canvas row predicts its own.
            pos=input_batch.positions[rows] - 1,
            seq_lens_upper_bound_np=input_batch.seq_lens_cpu_upper_bound.numpy(),
        )
        adjusted = logits.clone()
        for processor in self._processors:
            adjusted = processor.apply(adjusted, context)
        return adjusted
