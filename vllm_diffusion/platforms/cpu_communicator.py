"""Sums over tensor-parallel ranks that do not depend on where in a tensor a number stands.

gloo sums pieces of a tensor on different ranks, and each piece begins with another rank's share. With
three ranks and more, a row would then round by its place in the batch.
"""

from __future__ import annotations

from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class OrderedCpuCommunicator(CpuCommunicator):
    """vLLM's communicator for the CPU, with sums in the ranks' order."""

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum of every rank's ``input_``, a new tensor; rounded in its dtype after each rank."""
        first, *others = self.all_gather(input_[None].contiguous(), dim=0)
        total = first.clone()
        for values in others:
            total += values
        return total
