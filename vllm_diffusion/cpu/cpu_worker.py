"""The worker process of the CPU platform.

A sleeping server's worker gives memory of tensors back to the system and keeps their addresses: as
vLLM's allocator does on a GPU, everything stays where it is, views and all, but for what it
contains.
"""

import ctypes
import mmap
import os
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.mem_utils import format_gib
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from vllm_diffusion.startup.engine_process import leaving
from vllm_diffusion.startup.plan import plan_of, spec_of
from vllm_diffusion.weights.new_weights import FiniteWeights

_LIBC = ctypes.CDLL(None, use_errno=True)
_MADVISE = _LIBC.madvise
_MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
# Parameters of glibc's mallopt: the least size of what is mapped by itself, of which this is the
# largest value that glibc takes, and how much freed memory is kept.
_KEPT = {-3: 32 * 2**20, -1: 2**30}


def keep_freed_memory() -> None:
    """Have glibc keep what one layer frees for the next one.

    It would give tensors of megabytes back to the system after each operation, and their pages
    would fault again in the next one. Other libraries' allocators are left alone.
    """
    if hasattr(_LIBC, "mallopt"):
        for parameter, num_bytes in _KEPT.items():
            _LIBC.mallopt(parameter, num_bytes)


def discard(tensors: Iterable[Tensor]) -> int:
    """Forget what these tensors hold; until it is written again, it is zero.

    What shares a page with something else is set to zero, and stays.

    Args:
        tensors: On the CPU, in memory of this process alone. Those that share a storage count once.

    Returns:
        Bytes that were given back.
    """
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    given_back = 0
    for begin, storage in storages.items():
        end = begin + storage.nbytes()
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            ctypes.memset(begin, 0, end - begin)
            continue
        ctypes.memset(begin, 0, first - begin)
        ctypes.memset(last, 0, end - last)
        if _MADVISE(first, last - first, mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise failed")
        given_back += last - first
    return given_back


logger = init_logger(f"vllm.{__name__}")


class DiffusionCpuWorker(FiniteWeights, CPUWorker):
    """vLLM's CPU worker, less what it does for its compiled extension."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        keep_freed_memory()
        # The file or port at which the ranks meet names the shared memory of this engine's ranks
        # apart from that of any other engine.
        os.environ["VLLM_DIST_IDENT"] = re.split("[/:]", self.distributed_init_method)[-1]
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        # Data-parallel engines share the seed.
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        self.model_runner = self._make_model_runner()

    def load_model(self, **options: Any) -> None:
        with leaving(plan_of(self.vllm_config).refusal_path):
            super().load_model(**options)

    def compile_or_warm_up_model(self) -> Any:
        if spec_of(self.model_config) is not None:
            self.model_runner.compile_step()
        return super().compile_or_warm_up_model()

    def _make_model_runner(self) -> Any:
        if spec_of(self.model_config) is not None:
            from vllm_diffusion.cpu.canvas_cpu_runner import CanvasCpuRunner

            return CanvasCpuRunner(self.vllm_config, self.device)
        if self.use_v2_model_runner:
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner
        else:
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner
        return CPUModelRunner(self.vllm_config, self.device)

    def sleep(self, level: int = 1) -> None:
        """Discard the KV cache and, on level 2, the weights; buffers and requests' state stay.

        On level 1 vLLM moves weights to the memory of the CPU, where these are.

        Raises:
            ValueError: If a name that is to be preserved is not a parameter's.
        """
        parameters = self._discardable() if level == 2 else []
        self._discard("the KV cache", self.model_runner.kv_caches)
        if level == 2:
            self._discard("the weights", parameters)

    def _discardable(self) -> list[torch.Tensor]:
        """Parameters that no pattern of ``--sleep-preserve-parameter-names`` means."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        preserved: set[str] = set()
        for pattern in self.model_config.sleep_preserve_parameter_names:
            matched = {name for name in parameters if fnmatch(name, pattern)}
            if not matched:
                raise ValueError(
                    f"--sleep-preserve-parameter-names: {pattern} matches no parameter of the model."
                )
            preserved |= matched
        return [one.data for name, one in parameters.items() if name not in preserved]

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing: discarded memory is allocated again when it is written."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release memory for ``/release_kv_cache_memory``."""
        if "kv_cache" in tags:
            self._discard("the KV cache", self.model_runner.kv_caches)

    def _discard(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        given_back = discard(tensors)
        logger.info("Discarded %s: up to %s GiB given back.", what, format_gib(given_back))
