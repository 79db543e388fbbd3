"""Model state of Nemotron-Labs-Diffusion, which marks the rows of drafts."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_diffusion.canvas.slots import Phase
from vllm_diffusion.runner.model_state import BlockDiffusionModelState


class NemotronModelState(BlockDiffusionModelState):
    """Canvases are tokens; rows of a draft are marked where there is a LoRA for them."""

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        adapter = self.model.draft_adapter
        if adapter is not None:
            is_draft = adapter.is_draft_row.zero_()
            if input_batch.num_draft_tokens > 0:
                slot = input_batch.expanded_idx_mapping.long()
                is_draft[input_batch.logits_indices] = self.slots.phase[slot] == int(
                    Phase.DENOISING
                )
        return inputs
