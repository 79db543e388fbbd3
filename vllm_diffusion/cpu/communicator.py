"""Sums over ranks that do not depend on where in a tensor a number stands.

gloo sums pieces of a tensor on different ranks, and each piece begins with another rank's share.
With three ranks and more, a row would then round by its place in the batch.
"""

import torch
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class OrderedCpuCommunicator(CpuCommunicator):
    """vLLM's communicator for the CPU, with sums in the ranks' order, and shares of several sizes.

    The latter are what experts need whose tokens come from several engines (``experts.py``).
    """

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum of every rank's ``input_``, a new tensor; rounded in its dtype after each
        rank.
        """
        first, *others = self.all_gather(input_[None].contiguous(), dim=0)
        total = first.clone()
        for values in others:
            total += values
        return total

    def all_gatherv(
        self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        """Every rank's rows, one rank after another.

        Args:
            input_: [sizes[rank], ...], one tensor or several.
            dim: 0, the only one that vLLM asks for.
            sizes: Rows of each rank; ``None`` if all have as many.

        Returns:
            [sum(sizes), ...] for each.
        """
        assert dim == 0
        if isinstance(input_, list):
            return [self._all_gatherv(rows, sizes) for rows in input_]
        return self._all_gatherv(input_, sizes)

    def _all_gatherv(self, rows: Tensor, sizes: list[int] | None) -> Tensor:
        if sizes is None:
            return self.all_gather(rows.contiguous(), dim=0)
        # gloo gathers tensors of one shape.
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = self.all_gather(padded[None], dim=0)
        return torch.cat([of_rank[:size] for of_rank, size in zip(gathered, sizes, strict=True)])

    def reduce_scatterv(
        self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        """This rank's rows of what :meth:`all_reduce` returns.

        Args:
            input_: [sum(sizes), ...].
            dim: 0, the only one that vLLM asks for.
            sizes: Rows of each rank; ``None`` if all get as many.

        Returns:
            [sizes[rank], ...].
        """
        assert dim == 0
        if sizes is None:
            sizes = [len(input_) // self.world_size] * self.world_size
        first = sum(sizes[: self.rank_in_group])
        return self.all_reduce(input_)[first : first + sizes[self.rank_in_group]]
