"""vLLM's Ray executor on the CPU platform.

Ray reserves a CPU for each worker, but hands out no CPU by number: it neither takes ``CPU`` among
an actor's named resources nor lists it among an actor's accelerators, and vLLM's executor wants
both.
"""

import os
from typing import Any

import ray
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from vllm_diffusion.hooks.replacement import replaces


class CpuRayWorker(RayWorkerProc):
    """A worker of an engine in a Ray actor."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Ray's node, and the memory nodes of its machine in place of GPUs."""
        return ray.get_runtime_context().get_node_id(), get_visible_memory_node()


@replaces(
    "vllm.v1.executor.ray_executor_v2:RayWorkerProc",
    reason="The executor makes actors of this name; ours has memory nodes in place of accelerators.",
    until="A Ray executor may name the class of its workers.",
)
def _with_cpu_workers(stock: type[RayWorkerProc]) -> type[RayWorkerProc]:
    return CpuRayWorker


class CpuRayExecutor(RayExecutorV2):
    """vLLM's executor, whose workers take no accelerator.

    Each has a bundle of one CPU of the placement group, by the bundle's index.
    """

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {"num_gpus": 0}

    def _init_executor(self) -> None:
        # What it makes actors of is a name of that module's.
        _with_cpu_workers.install()
        if self.parallel_config.data_parallel_backend == "ray":
            # vLLM tells the workers' bundles, which come first, from the engine's own by the
            # workers' accelerator, and here that is a CPU as well.
            indices = range(self.parallel_config.world_size)
            os.environ.setdefault("VLLM_RAY_BUNDLE_INDICES", ",".join(map(str, indices)))
        super()._init_executor()
