"""Tensor-parallel ranks that are threads of the test's process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import HashStore, ProcessGroupGloo


class ThreadRanks:
    """Ranks with gloo between them, as between the processes of a server.

    Collectives read and write memory in its order, whatever a tensor's strides say.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._store = HashStore()
        self._of_thread = threading.local()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Return the result of ``work`` on each rank, which is its argument."""

        def run_rank(rank: int) -> Any:
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=120)
            group = ProcessGroupGloo(self._store, rank, self.num_ranks, options)
            self._of_thread.group = group
            return work(rank)

        with ThreadPoolExecutor(self.num_ranks) as pool:
            return list(pool.map(run_rank, range(self.num_ranks)))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place; called by each of them."""
        self._of_thread.group.allreduce([values]).wait()
        return values

    def all_gather(self, values: Tensor, dim: int) -> Tensor:
        """Return every rank's ``values``, concatenated; called by each of them."""
        assert dim == 0
        gathered = values.new_empty(self.num_ranks * values.shape[0], *values.shape[1:])
        self._of_thread.group._allgather_base(gathered, values).wait()
        return gathered
