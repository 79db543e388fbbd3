"""The CPU platform: what differs when the stock CUDA wheel of vLLM serves without an accelerator.

vLLM's own CPU platform expects its compiled CPU extension, which the CUDA wheel lacks. Here the
runner's Triton kernels run under Triton's interpreter (the hot ones as PyTorch, ``kernels.py``),
attention is this package's PyTorch reference, and experts are a PyTorch loop (``experts.py``).
Quantised layers are emulated (``quantized_linear.py``). Adapters are PyTorch products
(``expert_adapters.py``).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_diffusion.hooks.own_entry_points import own_entry_points
from vllm_diffusion.startup import machine
from vllm_diffusion.startup.environment import forces_cpu
from vllm_diffusion.startup.options import choose_worker
from vllm_diffusion.startup.plan import spec_of
from vllm_diffusion.weights.machine_fit import check_emulation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(f"vllm.{__name__}")

# Blocks of the size that GPUs use: short prompts then hit the prefix cache too.
DEFAULT_BLOCK_SIZE = 16
ATTENTION = "vllm_diffusion.attention.backend.CanvasAttentionBackend"
_WORKER = "vllm_diffusion.cpu.cpu_worker.DiffusionCpuWorker"


class DiffusionCpuPlatform(CpuPlatform):
    """vLLM's CPU platform without its compiled extension."""

    # What Ray reserves for a worker.
    ray_device_key = "CPU"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        # The first is what a checkpoint stored in float32 is served in.
        return [torch.float32, torch.bfloat16, torch.float16]

    def is_sleep_mode_available(self) -> bool:
        """The worker gives memory back to the system."""
        return True

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing, since there is no compiled CPU extension."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Runs in each worker before any model or runner code: put our pieces in place."""
        from vllm_diffusion.cpu import expert_adapters, experts, kernels, linear, quantized_linear

        for pieces in (kernels, linear, experts, quantized_linear, expert_adapters):
            pieces.register()
        if multiprocessing.parent_process() is not None:
            # vLLM collects garbage before and after most of what follows, and in what it has
            # imported there is none.
            gc.freeze()

    @classmethod
    def device_id_to_physical_device_id(cls, device_id: int) -> int:
        """A memory node of this machine: what a device is to vLLM's CPU worker.

        Ranks and replicas take turns on the nodes, of which most machines have one.
        """
        nodes = get_visible_memory_node()
        return nodes[device_id % len(nodes)]

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        """Return no cores, since NIXL would take cores named here from everything else."""
        return []

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_diffusion.cpu.communicator.OrderedCpuCommunicator"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm_diffusion.cpu.expert_adapters.RowsByAdapter"

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if attn_selector_config.use_mla or attn_selector_config.use_sparse:
            raise ValueError(
                "MLA and sparse attention need an accelerator or vLLM's compiled CPU build; "
                "the CPU platform of vllm-diffusion serves ordinary attention only."
            )
        if selected_backend not in (
            None,
            AttentionBackendEnum.CUSTOM,
            AttentionBackendEnum.CPU_ATTN,
            # What stock's own Gemma 4 hook chooses where FlashAttention is missing.
            AttentionBackendEnum.TRITON_ATTN,
        ):
            raise ValueError(
                f"--attention-backend {selected_backend.name} cannot run on the CPU platform of "
                "vllm-diffusion; leave it unset."
            )
        return ATTENTION

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation = vllm_config.compilation_config
        # Compiling a model of this size takes longer than most conversations with it.
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []
        # "all" would choose vLLM's compiled CPU operators.
        if "none" not in compilation.custom_ops:
            compilation.custom_ops = ["none"]
        # Interpreted kernels need no warm-up.
        vllm_config.kernel_config.enable_jit_warmup = False

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        problem = None if forces_cpu() else machine.nvidia_problem()
        if problem is not None:
            raise ValueError(
                f"{problem}. Update the driver, or set VLLM_DIFFUSION_CPU=1 to serve on the CPU."
            )

        model_config = vllm_config.model_config
        if model_config is not None and vllm_config.load_config.load_format != "dummy":
            machine.check_checkpoint_fits(model_config)
        _check_emulation(vllm_config)

        for entry in own_entry_points("vllm_diffusion.cpu_checks"):
            entry.load()(vllm_config)
        if vllm_config.diffusion_config is None:
            check_cache(vllm_config)
        parallel_config = vllm_config.parallel_config
        cache_config = vllm_config.cache_config
        cache_config.kv_cache_memory_bytes = machine.kv_cache_bytes(cache_config)

        # vLLM's CPU worker would read them as NUMA nodes. The supervisor of several servers numbers
        # theirs.
        parallel_config.assigned_physical_gpu_ids = None
        if spec_of(model_config) is not None:
            parallel_config.worker_cls = choose_worker(parallel_config.worker_cls, _WORKER)
        elif parallel_config.worker_cls == "auto":
            parallel_config.worker_cls = _WORKER
        if parallel_config.distributed_executor_backend == "ray":
            from vllm_diffusion.cpu.ray_worker import CpuRayExecutor

            parallel_config.distributed_executor_backend = CpuRayExecutor
        if parallel_config.enable_dbo:
            raise ValueError("--enable-dbo needs a GPU; leave it out on the CPU.")

        vllm_config.profiler_config.torch_profiler_dump_cuda_time_total = False
        # Processes of a script are spawned unless it sets another way: what else it has begun,
        # threads and sockets, is not theirs to inherit.
        if os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn") == "fork":
            logger.info_once(
                "The engine's processes are forked, since there is no accelerator; "
                "VLLM_WORKER_MULTIPROC_METHOD=spawn has them import everything again."
            )
        # vLLM's automatic binding wants a NUMA node for each rank and keeps one core idle.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"
        os.environ["LOCAL_WORLD_SIZE"] = str(parallel_config.tensor_parallel_size)

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        cache_config = vllm_config.cache_config
        if not cache_config.user_specified_block_size:
            cache_config.block_size = DEFAULT_BLOCK_SIZE


def _check_emulation(vllm_config: VllmConfig) -> None:
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    for model_config in (vllm_config.model_config, draft):
        if model_config is None:
            continue
        settings = model_config.model_arch_config.quantization_config
        if settings is not None:
            check_emulation(model_config.model, settings)


def check_cache(vllm_config: VllmConfig) -> None:
    """Refuse a KV cache of the target or of its draft that attention cannot read.

    For diffusion models the table of options refuses it.

    Raises:
        ValueError: Naming the option and the remedy.
    """
    known = resolve_obj_by_qualname(ATTENTION).supported_kv_cache_dtypes
    spec = vllm_config.speculative_config
    requested = {"--kv-cache-dtype": vllm_config.cache_config.cache_dtype}
    if spec is not None:
        requested["--speculative-config: kv_cache_dtype"] = spec.kv_cache_dtype or "auto"
    for option, dtype in requested.items():
        if dtype not in known:
            raise ValueError(
                f"{option} {dtype} is not supported by attention on the CPU platform of "
                f"vllm-diffusion; leave it out, or set it to {' or '.join(known)}."
            )
