"""Whether passes are scheduled before the last one's output is known, where the operator does not
say.
"""

import logging

logger = logging.getLogger("vllm.vllm_diffusion")

# Milliseconds of a pass that run on the host where a GPU runs the model, its attention and its
# sampler: vLLM's runner, our inputs and step, the scheduler, the engine's loop. Measured at one
# request by `OMP_NUM_THREADS=1 python benchmarks/bench_families.py --family sdar --profile` on two
# cores (benchmarks/RESULTS.md).
HOST_MS = 2.8
# Bytes of weights that a GPU reads in a millisecond, once in each pass: the memory bandwidth of one
# H100 SXM by its data sheet. Not measured: the experiment `order` of benchmarks/gpu/ will.
GPU_BYTES_PER_MS = 3.35e9
# Denoising steps of a canvas with which vLLM published DiffusionGemma's speed.
TYPICAL_STEPS = 16


def asynchronous_pays(device_ms: float, steps: int, extra: int) -> bool:
    """Return true if a GPU denoises a canvas sooner in the asynchronous order.

    A canvas of N denoising steps takes N passes in the synchronous order, where each pass waits for
    the host's work before it. In the asynchronous order the host works while the device does, but
    learns too late which step was the last: the canvas takes one more pass, which encodes and emits
    it. So that order pays if (N + 1) of its passes take less than N of the others: with host time h
    and device time d of a pass, if (N + 1) max(d, h) < N (d + h), which is N h > d for d above h.

    Args:
        device_ms: Milliseconds of a pass on the device.
        steps: Denoising steps of a canvas, at least 1.
        extra: Passes of a canvas beyond those of the synchronous order.
    """
    return (steps + extra) * max(device_ms, HOST_MS) < steps * (device_ms + HOST_MS)


def choose_async_scheduling(steps: int, extra: int, bytes_of_rank: float) -> bool | None:
    """Choose the synchronous order where it is faster, for an operator who chooses none.

    The asynchronous order is left to vLLM, which takes it wherever it can; so is the choice on a
    GPU where the weights are not on this machine yet, and their size is not known. On a CPU the
    host's work competes with the model's, so that the asynchronous order does not pay: a pass of
    one canvas took 9.8 ms in it and 9.3 ms in the other, by `python benchmarks/bench_passes.py`
    with the shipped checkpoint on two cores.

    Args:
        steps: Denoising steps of a canvas, at least 1.
        extra: Passes of a canvas beyond those of the synchronous order.
        bytes_of_rank: Bytes of weights that a GPU reads in a pass; 0 if they are not known.

    Returns:
        ``async_scheduling``; ``None`` leaves it to vLLM.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        logger.info(
            "synchronous scheduling: on a CPU asynchronous scheduling gains nothing; "
            "--async-scheduling sets it."
        )
        return False
    device_ms = bytes_of_rank / GPU_BYTES_PER_MS
    if not device_ms:
        return None
    pays = asynchronous_pays(device_ms, steps, extra)
    logger.info(
        "%s scheduling, by an estimate for a canvas of %d steps: a pass takes %.1f ms on the device and "
        "%.1f ms on the host; --async-scheduling and --no-async-scheduling set it.",
        "asynchronous" if pays else "synchronous",
        steps,
        device_ms,
        HOST_MS,
    )
    return None if pays else False
