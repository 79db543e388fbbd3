"""The worker process of the CPU platform."""

from __future__ import annotations

import os
from typing import Any

import torch

# The CUDA wheel has no CPU extension; the stock CPU worker calls this one operator of it, to bind
# memory to a NUMA node, which is not needed to be correct.
if not hasattr(torch.ops._C, "init_cpu_memory_env"):
    _library: Any = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    _library.define("init_cpu_memory_env(int[] nodes) -> ()")
    _library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")

from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment


class DiffusionCpuWorker(CPUWorker):
    """vLLM's CPU worker, less what it does for its compiled extension."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_method = self.distributed_init_method
        # Names the shared memory of this engine's ranks apart from that of any other engine.
        os.environ["VLLM_DIST_IDENT"] = (
            os.path.basename(init_method.removeprefix("file://"))
            if init_method.startswith("file://")
            else init_method.split(":")[-1]
        )
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        if self.use_v2_model_runner:
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner
        else:
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner
        self.model_runner = CPUModelRunner(self.vllm_config, self.device)
