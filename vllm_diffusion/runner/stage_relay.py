"""Messages of a pass from the last pipeline stage to the stages before it.

Canvases live where the sampler is, on the last stage; their next pass begins on the first. So each
pass ends with a message from the last stage to all others:

- for each request of the pass, as int32: its phase and step, the number of emitted tokens and of
rows
  whose keys and values it does not keep (:data:`NUMBERS`); its next canvas; the tokens that it may
  have emitted.
- for each canvas row, to the first stage alone and in the model's dtype: the soft embedding, if the
  model has self-conditioning.

Both sides know the passes and their sizes from the scheduler, so that nothing else is sent, and in
the passes' order. A stage posts its receives when its part of a pass has run, and waits for them as
many passes later as there are stages: the scheduler has no request in two passes nearer than that
if the second one's rows depend on the first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.hooks.replacement import stands_for

# Leading numbers of a request's row of the message.
NUMBERS = ("phase", "step", "num_sampled", "num_rejected")


@dataclass(frozen=True)
class _Expected:
    """A message that is on its way.

    Attributes:
        requests: [num_reqs, 4 + 2 * C], int32.
        soft_embeds: [num_rows, hidden_size], or ``None``.
        works: Ends with them.
        batch: The pass.
        owners: [num_reqs], int64: how often each slot had changed hands.
    """

    requests: Tensor
    soft_embeds: Tensor | None
    works: list[Any]
    batch: InputBatch
    owners: np.ndarray


@stands_for("vllm.v1.worker.gpu.pp_utils:PPHandler")
class StageRelay:
    """The model runner's ``pp_handler`` for canvases; one on each stage."""

    def __init__(
        self, stock: Any, slots: CanvasSlots, soft_embeds: Tensor | None, num_stages: int
    ) -> None:
        """Take the place of vLLM's handler, before the first pass.

        Args:
            stock: vLLM's handler, whose process group is used.
            slots: Canvases of the stage: decided on the last stage, copied on the others.
            soft_embeds: [R, C, hidden_size], soft embeddings, on the stages that have them.
            num_stages: Number of stages of the pipeline.
        """
        self._group = stock.broadcast_group
        self._first, self._last = 0, num_stages - 1
        self._slots = slots
        self._soft_embeds = soft_embeds
        self._owners = np.zeros(slots.num_slots, dtype=np.int64)
        # On the last stage: tensors being sent, which must not be freed meanwhile.
        self._sent: tuple[list[Any], list[Tensor | None]] = ([], [])
        # On the other stages: expected messages by pass.
        self._expected: deque[_Expected | None] = deque([None] * num_stages)

    # What the runner calls, in the order of a pass.

    def on_req_idx_freed(self, slot: int) -> None:
        """Discard messages in flight for the slot, whose request has ended."""
        self._owners[slot] += 1

    def get_prev_sampled_outputs(self) -> dict[str, Any] | None:
        """Follow the message that is due, at the start of a pass of any but the last stage.

        Returns:
            What the runner's own ``postprocess_sampled`` takes: emitted tokens, and how far each
            sequence is; ``None`` if nothing is due.
        """
        due = self._expected.popleft()
        self._expected.append(None)
        if due is None:
            return None
        for work in due.works:
            work.wait()
        num_reqs = due.batch.num_reqs
        slots_np = due.batch.idx_mapping_np[:num_reqs]
        # A slot that changed hands meanwhile is its new owner's.
        kept = self._owners[slots_np] == due.owners
        index = async_tensor_h2d(np.flatnonzero(kept), device=self._slots.device)
        slot = due.batch.idx_mapping[index].long()
        phase, step, num_sampled, num_rejected = due.requests[:, : len(NUMBERS)].unbind(dim=1)
        canvas, tokens = due.requests[:, len(NUMBERS) :].chunk(2, dim=1)
        for target, values in (
            (self._slots.phase, phase),
            (self._slots.step, step),
            (self._slots.canvas, canvas),
        ):
            target[slot] = values[index].to(target.dtype)
        if due.soft_embeds is not None:
            self._keep_soft_embeds(due.batch, due.soft_embeds, kept)
        return {
            "idx_mapping": async_tensor_h2d(
                np.where(kept, slots_np, -1), device=self._slots.device
            ),
            "sampled_tokens": tokens,
            "num_sampled": num_sampled.contiguous(),
            "num_rejected": num_rejected.contiguous(),
        }

    def receive(self, input_batch: InputBatch, recv_drafts: bool) -> bool:
        """Post the receives of a pass's messages, and return at once.

        Args:
            input_batch: The pass.
            recv_drafts: Ignored: canvases take the place of drafts.

        Returns:
            ``True``: the runner has nothing to add.
        """
        device = self._slots.device
        width = len(NUMBERS) + 2 * self._slots.canvas_length
        requests = torch.empty(input_batch.num_reqs, width, dtype=torch.int32, device=device)
        works = [
            torch.distributed.broadcast(
                requests, group=self._group, group_src=self._last, async_op=True
            )
        ]
        soft_embeds = None
        if self._soft_embeds is not None and input_batch.num_draft_tokens > 0:
            soft_embeds = self._soft_embeds.new_empty(
                input_batch.num_draft_tokens, self._soft_embeds.shape[-1]
            )
            works.append(
                torch.distributed.irecv(soft_embeds, group=self._group, group_src=self._last)
            )
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
        self._expected[-1] = _Expected(
            requests, soft_embeds, works, input_batch, self._owners[slots]
        )
        return True

    def broadcast(
        self,
        sampled_token_ids: Tensor,
        num_sampled: Tensor,
        num_rejected: Tensor,
        input_batch: InputBatch,
    ) -> None:
        """Send the message of a pass, from the last stage.

        Args:
            sampled_token_ids: [num_reqs, C], that each request may have emitted.
            num_sampled: [num_reqs], how many of them it did.
            num_rejected: [num_reqs], rows whose keys and values do not count.
            input_batch: The pass.
        """
        slot = input_batch.idx_mapping[: input_batch.num_reqs].long()
        numbers = (self._slots.phase[slot], self._slots.step[slot], num_sampled, num_rejected)
        requests = torch.cat(
            [
                torch.stack([number.to(torch.int32) for number in numbers], dim=1),
                self._slots.canvas[slot].to(torch.int32),
                sampled_token_ids.to(torch.int32),
            ],
            dim=1,
        )
        for work in self._sent[0]:
            work.wait()
        works = [
            torch.distributed.broadcast(
                requests, group=self._group, group_src=self._last, async_op=True
            )
        ]
        soft_embeds = None
        if self._soft_embeds is not None and input_batch.num_draft_tokens > 0:
            soft_embeds = self._soft_embeds[
                input_batch.expanded_idx_mapping.long(), input_batch.expanded_local_pos.long()
            ]
            works.append(
                torch.distributed.isend(soft_embeds, group=self._group, group_dst=self._first)
            )
        self._sent = (works, [requests, soft_embeds])

    def broadcast_drafts(self, draft_tokens: Tensor) -> None:
        """Do nothing, since draft tokens are only for the scheduler."""

    def relay_aux_hidden_states(self, received: Any, output: Any) -> Any:
        """Return the model's own tensors, which the next stage is sent."""
        return output

    def _keep_soft_embeds(self, batch: InputBatch, soft_embeds: Tensor, kept: np.ndarray) -> None:
        """Scatter them to their slots, but for those that are another request's now."""
        assert self._soft_embeds is not None
        num_rows = np.diff(batch.cu_num_logits_np[: batch.num_reqs + 1])
        rows = np.flatnonzero(np.repeat(kept, num_rows))
        row = async_tensor_h2d(rows, device=self._slots.device)
        slot = batch.expanded_idx_mapping[row].long()
        position = batch.expanded_local_pos[row].long()
        self._soft_embeds[slot, position] = soft_embeds[row]
