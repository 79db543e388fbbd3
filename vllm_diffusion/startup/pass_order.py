"""The order of passes, and the classes of scheduler and worker, where the operator names none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_diffusion.startup.machine import checkpoint_bytes

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

    from vllm_diffusion.decoding.canvas_spec import CanvasSpec


def choose_worker(parallel_config: ParallelConfig, worker: str) -> None:
    """Choose the class of the workers, or check the operator's.

    Args:
        parallel_config: Configuration, changed in place.
        worker: Path of our class.

    Raises:
        ValueError: If the operator's class does not derive from ours.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if parallel_config.worker_cls == "auto":
        parallel_config.worker_cls = worker
    # A configuration is checked again in each process; our class need not be imported for that.
    if parallel_config.worker_cls == worker:
        return
    bases = resolve_obj_by_qualname(parallel_config.worker_cls).__mro__
    if worker not in {f"{base.__module__}.{base.__qualname__}" for base in bases}:
        raise ValueError(
            f"--worker-cls {parallel_config.worker_cls} has no model runner for canvases; derive it "
            f"from {worker}, or leave it out and use --worker-extension-cls."
        )


logger = logging.getLogger("vllm.vllm_diffusion")


SCHEDULER = "vllm_diffusion.scheduling.canvas_scheduler.canvas_scheduler"
# Milliseconds of a pass that run on the host where a GPU runs the model, its attention and its sampler:
# vLLM's runner, our inputs and step, the scheduler, the engine's loop. Measured at one request by
# `OMP_NUM_THREADS=1 python benchmarks/bench_families.py --family sdar --profile` on two cores
# (benchmarks/RESULTS.md).
HOST_MS = 2.8
# Bytes of weights that a GPU reads in a millisecond, once in each pass: the memory bandwidth of one H100
# SXM by its data sheet. Not measured: the experiment `order` of benchmarks/gpu/ will.
GPU_BYTES_PER_MS = 3.35e9
# Denoising steps of a canvas with which vLLM published DiffusionGemma's speed.
TYPICAL_STEPS = 16


def asynchronous_pays(device_ms: float, steps: int, extra: int) -> bool:
    """Return true if a GPU denoises a canvas sooner in the asynchronous order.

    A canvas of N denoising steps takes N passes in the synchronous order, where each pass waits for the
    host's work before it. In the asynchronous order the host works beside the device, but learns too
    late which step was the last: the canvas takes one more pass, which encodes and emits it. So that
    order pays if (N + 1) of its passes take less than N of the others: with host time h and device time
    d of a pass, if (N + 1) max(d, h) < N (d + h), which is N h > d for d above h.

    Args:
        device_ms: Milliseconds of a pass on the device.
        steps: Denoising steps of a canvas, at least 1.
        extra: Passes of a canvas beyond those of the synchronous order.
    """
    return (steps + extra) * max(device_ms, HOST_MS) < steps * (device_ms + HOST_MS)


def choose_order(vllm_config: VllmConfig) -> None:
    """Choose the synchronous order if it is faster; an operator's choice stays.

    The asynchronous order is left to vLLM, which takes it wherever it can; so is the choice on a GPU
    where the weights are not on this machine yet, and their size is not known. On a CPU the host's work
    competes with the model's, so that the asynchronous order does not pay: a pass of one canvas took
    9.8 ms in it and 9.3 ms in the other, by `python benchmarks/bench_passes.py` with the shipped
    checkpoint on two cores.

    Args:
        vllm_config: Configuration with a ``canvas_spec``, changed in place.
    """
    from vllm.platforms import current_platform

    scheduler_config = vllm_config.scheduler_config
    if scheduler_config.async_scheduling is not None:
        return
    if current_platform.is_cpu():
        scheduler_config.async_scheduling = False
        logger.info(
            "synchronous scheduling: on a CPU the asynchronous order hides nothing; "
            "--async-scheduling sets it."
        )
        return
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    device_ms = checkpoint_bytes(vllm_config.model_config.model) / num_ranks / GPU_BYTES_PER_MS
    if not device_ms:
        return
    spec: CanvasSpec = vllm_config.model_config.canvas_spec
    steps = min(TYPICAL_STEPS, spec.max_denoising_steps)
    pays = asynchronous_pays(device_ms, steps, spec.extra_async_passes())
    if not pays:
        scheduler_config.async_scheduling = False
    logger.info(
        "%s scheduling, by an estimate for a canvas of %d steps: a pass takes %.1f ms on the device and "
        "%.1f ms on the host; --async-scheduling and --no-async-scheduling set it.",
        "asynchronous" if pays else "synchronous",
        steps,
        device_ms,
        HOST_MS,
    )


def choose_scheduler(vllm_config: VllmConfig) -> None:
    scheduler_config = vllm_config.scheduler_config
    if scheduler_config.scheduler_cls is None:
        scheduler_config.scheduler_cls = SCHEDULER
    choose_order(vllm_config)
    # An image's rows attend to one another in both directions, so they must be in one pass.
    scheduler_config.disable_chunked_mm_input = True
