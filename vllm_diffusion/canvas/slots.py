"""Per-request tensors of a block-diffusion model, one row per slot, at addresses that never change.

R is the number of slots (``max_num_seqs``), C the canvas length. The host stages what a new
request brings and :meth:`CanvasSlots.apply_staged_writes` copies it once per step; the rest is
written by the compiled step of the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_diffusion.requests.params import CanvasParams


@dataclass(frozen=True)
class DenoisingDefaults:
    """What a request gets that does not say otherwise.

    Attributes:
        max_denoising_steps: N, also the most that a request may ask for.
        t_min: Temperature after the last step.
        t_max: Temperature at the first step.
        entropy_bound: Nats.
        confidence_threshold: Mean entropy in nats below which a canvas may stop (entropy bound),
            or probability from which a token is revealed (confidence threshold).
        stability_threshold: Steps that must repeat the argmax canvas.
    """

    max_denoising_steps: int
    t_min: float
    t_max: float
    entropy_bound: float
    confidence_threshold: float
    stability_threshold: int


# vLLM's own bound on the end tokens of a request.
MAX_END_TOKENS = 128
# What a request may override, under the same name in its parameters, the defaults and the slots.
_QUALITY = ("stability_threshold", "entropy_bound", "confidence_threshold", "t_min", "t_max")


def _chosen(params: CanvasParams, defaults: DenoisingDefaults, name: str) -> float:
    """The request's own value, or the server's."""
    value: float | None = getattr(params, name)
    default: float = getattr(defaults, name)
    return default if value is None else value


class CanvasSlots:
    """The canvases of all running requests."""

    def __init__(
        self,
        num_slots: int,
        canvas_length: int,
        defaults: DenoisingDefaults,
        device: torch.device,
    ) -> None:
        R, C = num_slots, canvas_length
        self.num_slots = R
        self.canvas_length = C
        self.defaults = defaults
        self.device = device

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # The denoising loop's state.
        self.canvas = zeros(R, C, dtype=torch.int64)
        self.argmax_canvas = zeros(R, C, dtype=torch.int64)
        self.step = zeros(R, dtype=torch.int32)
        self.stable_steps = zeros(R, dtype=torch.int32)
        self.canvas_idx = zeros(R, dtype=torch.int32)
        # True while a request's rows are known tokens: its prompt, or a finished canvas.
        self.encoding = zeros(R, dtype=torch.bool)

        # What the request asked for.
        self.max_steps = zeros(R, dtype=torch.int32)
        self.stability_threshold = zeros(R, dtype=torch.int32)
        self.entropy_bound = zeros(R, dtype=torch.float32)
        self.confidence_threshold = zeros(R, dtype=torch.float32)
        self.t_min = zeros(R, dtype=torch.float32)
        self.t_max = zeros(R, dtype=torch.float32)
        self.read_only = zeros(R, dtype=torch.bool)
        self.seed_canvas = zeros(R, C, dtype=torch.int64)
        self.has_seed_canvas = zeros(R, dtype=torch.bool)
        self.pinned = zeros(R, C, dtype=torch.bool)
        # Tokens that end the request; -1 where there are fewer.
        self.end_tokens = zeros(R, MAX_END_TOKENS, dtype=torch.int64)

        # Host side: what features are in use, so that those that are not cost nothing.
        self.read_only_np = np.zeros(R, dtype=bool)
        # By slot, the only ids that a read-only canvas is asked about.
        self.allowed_ids: dict[int, tuple[int, ...]] = {}
        self._staged: dict[int, tuple[CanvasParams, int, Sequence[int]]] = {}

    def add_request(
        self,
        slot: int,
        params: CanvasParams,
        num_generated: int,
        end_tokens: Sequence[int] = (),
    ) -> None:
        """Stage a new owner of ``slot``; every tensor's row is rewritten.

        Args:
            slot: The row.
            params: What the request asks of its canvases.
            num_generated: Tokens that it generated before it was preempted; 0 for a new request.
            end_tokens: Tokens that end it, at most ``MAX_END_TOKENS``.
        """
        self._staged[slot] = (params, num_generated, end_tokens)
        self.read_only_np[slot] = params.read_only
        self.allowed_ids.pop(slot, None)
        if params.allowed_ids is not None:
            self.allowed_ids[slot] = params.allowed_ids

    def remove_request(self, slot: int) -> None:
        """Forget what the host keeps of ``slot``; its tensors are rewritten by the next owner."""
        self._staged.pop(slot, None)
        self.read_only_np[slot] = False
        self.allowed_ids.pop(slot, None)

    def apply_staged_writes(self) -> None:
        """Copy staged rows to the device, all at once."""
        if not self._staged:
            return
        C = self.canvas_length
        slots = list(self._staged)
        rows = list(self._staged.values())
        self._staged.clear()
        index = self._to_device(np.array(slots, dtype=np.int64))

        defaults = self.defaults
        for tensor, values in (
            (self.max_steps, [p.max_steps or defaults.max_denoising_steps for p, _, _ in rows]),
            *(
                (getattr(self, name), [_chosen(p, defaults, name) for p, _, _ in rows])
                for name in _QUALITY
            ),
            (self.read_only, [p.read_only for p, _, _ in rows]),
            (self.has_seed_canvas, [p.seed_canvas is not None for p, _, _ in rows]),
            (self.canvas_idx, [n // (p.canvas_length or C) for p, n, _ in rows]),
        ):
            tensor[index] = self._to_device(torch.tensor(values, dtype=tensor.dtype).numpy())
        # Assigning a number by index would wait for the device to take it.
        for tensor in (self.step, self.stable_steps, self.canvas):
            tensor.index_fill_(0, index, 0)
        self.argmax_canvas.index_fill_(0, index, -1)
        self.encoding.index_fill_(0, index, True)

        seed_canvas = np.zeros((len(rows), C), dtype=np.int64)
        pinned = np.zeros((len(rows), C), dtype=bool)
        end_tokens = np.full((len(rows), MAX_END_TOKENS), -1, dtype=np.int64)
        for i, (params, _, ends) in enumerate(rows):
            end_tokens[i, : len(ends)] = ends
            if params.seed_canvas is not None:
                seed_canvas[i, : len(params.seed_canvas)] = params.seed_canvas
            pinned[i, list(params.pinned)] = True
        self.seed_canvas[index] = self._to_device(seed_canvas)
        self.pinned[index] = self._to_device(pinned)
        self.end_tokens[index] = self._to_device(end_tokens)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(array, device=self.device)
