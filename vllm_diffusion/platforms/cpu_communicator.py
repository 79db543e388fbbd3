"""Collectives between ranks on the CPU whose results do not depend on where in a tensor a number stands.

gloo sums pieces of a tensor on different ranks, and each piece begins with another rank's share. With
three ranks and more, a row would then round by its place in the batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class OrderedCpuCommunicator(CpuCommunicator):
    """vLLM's communicator for the CPU, with sums in the ranks' order and uneven shares.

    The uneven ones are what experts need whose tokens come from several engines: see
    ``cpu_experts``.
    """

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum of every rank's ``input_``, a new tensor; rounded in its dtype after each rank."""
        return _sum_in_order(self.all_gather(input_[None].contiguous(), dim=0))

    def all_gatherv(
        self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        """Every rank's rows, one rank after another.

        Args:
            input_: [sizes[rank], ...], one or several.
            dim: 0.
            sizes: Rows of each rank; ``None`` if all have as many.

        Returns:
            [sum(sizes), ...] for each.
        """
        if isinstance(input_, list):
            return [self._all_gatherv(one, sizes) for one in input_]
        assert dim == 0
        return self._all_gatherv(input_, sizes)

    def _all_gatherv(self, input_: Tensor, sizes: list[int] | None) -> Tensor:
        sizes = sizes or [input_.shape[0]] * self.world_size
        most = max(sizes)
        # gloo gathers equal shapes only.
        padded = input_.new_zeros(most, *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        gathered = self.all_gather(padded[None], dim=0)
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])

    def reduce_scatterv(
        self, input_: Tensor, dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor:
        """This rank's rows of the sum of every rank's ``input_``.

        Args:
            input_: [sum(sizes), ...].
            dim: 0.
            sizes: Rows of each rank; ``None`` if all get as many.

        Returns:
            [sizes[rank], ...]; rounded in its dtype after each rank.
        """
        assert dim == 0
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        own = sizes[self.rank_in_group]
        shares = input_.new_empty(self.world_size * own, *input_.shape[1:])
        dist.all_to_all_single(
            shares,
            input_.contiguous(),
            output_split_sizes=[own] * self.world_size,
            input_split_sizes=sizes,
            group=self.device_group,
        )
        return _sum_in_order(shares.unflatten(0, (self.world_size, own)))


def _sum_in_order(of_ranks: Tensor) -> Tensor:
    """The sum over the first dimension, one after another."""
    first, *others = of_ranks
    total = first.clone()
    for values in others:
        total += values
    return total
