"""Canvases that go out with a pass: those that a client watches or a constraint reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_diffusion.canvas.messages import pack
from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.canvas.step import StepOutput


class CanvasViewConnector:
    """The runner's ``aux_output_connector``: canvases that a client watches or a constraint reads.

    The runner copies them off the device with a pass's outputs and hands them to the scheduler.
    vLLM's own connector carries routed experts, which no diffusion model is started with, so the
    place is free. A pass without watched or constrained canvases costs one comparison.
    """

    def __init__(self, slots: CanvasSlots, num_rows: Tensor, entropy: Tensor) -> None:
        """Bind the connector to a sampler, whose tensors hold the last pass.

        Args:
            slots: The canvases.
            num_rows: [R], int32, canvas rows of each slot.
            entropy: [R, C], float32.
        """
        self._slots = slots
        self._num_rows = num_rows
        self._entropy = entropy
        self._output: StepOutput | None = None
        self._began_from: Tensor | None = None

    def begin_pass(self) -> None:
        """Remember the canvases as the pass finds them, where one is read."""
        self._began_from = self._slots.canvas.clone() if self._slots.features.viewed else None

    def keep(self, output: StepOutput) -> None:
        """Remember the outcome of the pass, by slot."""
        self._output = output

    def begin_step(self, metadata: None) -> None:
        """Do nothing: requests themselves say whose canvases are read."""

    def prepare_output(self, input_batch: InputBatch) -> PendingViews | None:
        """The views of this pass, on the device; ``None`` if none is read."""
        if not self._slots.features.viewed:
            return None
        num_reqs = input_batch.num_reqs
        slots = input_batch.idx_mapping_np[:num_reqs]
        has_canvas = np.diff(input_batch.cu_num_logits_np[: num_reqs + 1]) > 0
        chosen = [
            i for i in np.flatnonzero(has_canvas) if int(slots[i]) in self._slots.features.viewed
        ]
        if not chosen:
            return None
        assert self._output is not None
        assert self._began_from is not None
        num_rows = self._output.num_final
        slot = async_tensor_h2d(slots[chosen].astype(np.int64), device=self._slots.device)
        views = pack(
            self._output,
            self._began_from,
            self._num_rows if num_rows is None else num_rows,
            self._slots.requested.max_steps,
            self._entropy,
            slot,
        )
        return PendingViews([input_batch.req_ids[i] for i in chosen], views)

    def close(self) -> None:
        """Do nothing: the connector holds nothing."""


class PendingViews:
    """Views of a pass that are being copied."""

    def __init__(self, req_ids: list[str], views: Tensor) -> None:
        self._req_ids = req_ids
        self._views = views
        self._copied: np.ndarray | None = None

    def enqueue_cpu_copy(self, num_sampled: Any, num_rejected: Any) -> None:
        """Copy the views, on the stream of output copies."""
        self._copied = self._views.to("cpu", non_blocking=True).numpy()

    def process_output(self) -> dict[str, np.ndarray]:
        """Return the row of each request for ``CanvasView``; the copies are done."""
        assert self._copied is not None
        return dict(zip(self._req_ids, self._copied, strict=True))
