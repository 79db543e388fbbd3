"""Sampling settings of the requests, by slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.sampling.candidate_filters import CandidateFilters


class SlotSettings:
    """Temperatures, seeds, filters and log-probabilities that the requests ask for, by slot.

    vLLM's own states take them from a request, and rotate among several buffers of the host. Graphs need
    fixed addresses, so the values are copied to fixed tensors when a request comes. R is the number of
    slots.

    Attributes:
        states: vLLM's sampling states; the host reads its NumPy side.
        token_ids: vLLM's state of ``logprob_token_ids``.
        temperature: [R], float32, the ``temperature`` of each request.
        filters: [R] each, the filters of each request.
    """

    def __init__(self, stock_sampler: Any, slots: CanvasSlots, seeds: Tensor) -> None:
        """Allocate for all slots.

        Args:
            stock_sampler: vLLM's sampler.
            slots: The canvases.
            seeds: [R], int64, filled with the seed of each request.
        """
        R, device = slots.num_slots, slots.device
        self.states = stock_sampler.sampling_states
        self.token_ids = stock_sampler.logprob_token_ids_state
        self.temperature = torch.ones(R, dtype=torch.float32, device=device)
        self.filters = CandidateFilters(
            torch.full((R,), slots.vocab_size, dtype=torch.int32, device=device),
            torch.ones(R, dtype=torch.float32, device=device),
            torch.zeros(R, dtype=torch.float32, device=device),
        )
        self._vocab_size = slots.vocab_size
        self._seeds = seeds
        self._is_staged = False

    def add_request(self, slot: int, sampling_params: Any) -> None:
        """Stage the settings of ``slot``'s new owner."""
        self._is_staged = True
        self.states.add_request(slot, sampling_params)
        self.token_ids.add_request(slot, sampling_params)

    def apply_staged_writes(self) -> None:
        """Copy the settings of new requests to the device, if there are any."""
        if not self._is_staged:
            return
        self._is_staged = False
        states, (top_k, top_p, min_p) = self.states, self.filters
        states.apply_staged_writes()
        self.token_ids.apply_staged_writes()
        assert top_k is not None
        assert top_p is not None
        assert min_p is not None
        R = len(self.temperature)
        self._seeds.copy_(states.seeds.gpu[:R])
        self.temperature.copy_(states.temperature.gpu[:R])
        top_k.copy_(states.top_k.gpu[:R])
        top_p.copy_(states.top_p.gpu[:R])
        min_p.copy_(states.min_p.gpu[:R])

    def used_filters(self, slots_np: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Three times [num_reqs], bool: requests that have top-k, top-p and min-p.

        Args:
            slots_np: [num_reqs], their slots.
        """
        states = self.states
        return (
            states.top_k.np[slots_np] != self._vocab_size,
            states.top_p.np[slots_np] != 1.0,
            states.min_p.np[slots_np] != 0.0,
        )

    def filters_of(self, slot: Tensor, slots_np: np.ndarray) -> CandidateFilters:
        """[n] each: filters of rows, without a filter that no request of the pass has.

        Args:
            slot: [n], int64, of the rows.
            slots_np: [num_reqs], slots of the pass.
        """
        has_top_k, has_top_p, has_min_p = (used.any() for used in self.used_filters(slots_np))
        return CandidateFilters(
            self.filters.top_k if has_top_k else None,
            self.filters.top_p if has_top_p else None,
            self.filters.min_p if has_min_p else None,
        ).rows(slot)

    def wants_logprobs(self, slots_np: np.ndarray) -> np.ndarray:
        """[num_reqs], bool: requests that want log-probabilities."""
        names_ids = self.token_ids.num_token_ids.np[slots_np] > 0
        wants: np.ndarray = (self.states.num_logprobs[slots_np] >= 0) | names_ids
        return wants

    def names_logprob_ids(self, slots_np: np.ndarray) -> bool:
        """Report whether some request names the ids whose log-probabilities it wants."""
        return bool(self.token_ids.num_token_ids.np[slots_np].any())

    def num_top(self, slots_np: np.ndarray) -> int:
        """Most likeliest tokens whose log-probabilities a request wants; 0 for none."""
        return max(int(self.states.num_logprobs[slots_np].max()), 0)

    def logprob_ids(self, slot: Tensor, slots_np: np.ndarray) -> tuple[Tensor, Tensor]:
        """[n, num_ids], int64, and [n], int32: ids that rows report, and how many each row has.

        Args:
            slot: [n], int64, of the rows.
            slots_np: [num_reqs], slots of the pass.
        """
        ids = self.token_ids
        num_ids = ids.max_num_token_ids(slots_np)
        return ids.token_ids.gpu[slot, :num_ids].long(), ids.num_token_ids.gpu[slot]
