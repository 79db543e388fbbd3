"""Default order of passes, synchronous or asynchronous, chosen by the cost of a pass in each.

A canvas of N denoising steps takes N passes in the synchronous order, where each pass waits for the
host's work before it. In the asynchronous order the host works beside the device, but learns too
late which step was the last: the canvas takes one more pass, which encodes and emits it. So that
order pays if (N + 1) of its passes take less than N of the others: with host time h and device time
d of a pass, if (N + 1) max(d, h) < N (d + h), which is N h > d for d above h.

The figures are in ``pass_times.toml``, each with its command, or marked as an estimate.
"""

from __future__ import annotations

import functools
import logging
import tomllib
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.startup.plugin_settings import plugin_settings
from vllm_diffusion.startup.request_capacity import weight_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")


class PassTimes(NamedTuple):
    """Milliseconds of a pass in each order."""

    synchronous: float
    asynchronous: float


@functools.cache
def figures() -> dict[str, dict[str, float]]:
    """Read ``pass_times.toml``."""
    text = files("vllm_diffusion.startup").joinpath("pass_times.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def cpu_times() -> PassTimes:
    """Return the measured times: on a CPU the host's work competes with the model's."""
    measured = figures()["cpu"]
    return PassTimes(measured["synchronous_ms"], measured["asynchronous_ms"])


def gpu_times(num_bytes: int) -> PassTimes:
    """Estimate the times of a GPU: a pass reads the weights once; asynchronously the host is hidden.

    Args:
        num_bytes: Bytes of the weights on one rank.
    """
    host, device = figures()["host"]["ms"], num_bytes / figures()["gpu"]["bytes_per_ms"]
    return PassTimes(device + host, max(device, host))


def asynchronous_pays(times: PassTimes, steps: int, extra: int) -> bool:
    """Return true if a canvas is denoised sooner in the asynchronous order.

    Args:
        times: Times of a pass in both orders.
        steps: Denoising steps of a canvas, at least 1.
        extra: Passes of a canvas beyond those of the synchronous order.
    """
    return (steps + extra) * times.asynchronous < steps * times.synchronous


def choose_order(vllm_config: VllmConfig) -> None:
    """Choose the synchronous order if it is faster; an operator's choice stays.

    The asynchronous order is left to vLLM, which takes it wherever it can.

    Args:
        vllm_config: Configuration with a ``canvas_spec``, changed in place.
    """
    from vllm.platforms import current_platform

    scheduler_config = vllm_config.scheduler_config
    if scheduler_config.async_scheduling is not None:
        return
    if plugin_settings(vllm_config).fused_encode is True:
        scheduler_config.async_scheduling = False
        return
    spec: CanvasSpec = vllm_config.model_config.canvas_spec
    times = cpu_times() if current_platform.is_cpu() else gpu_times(weight_bytes(vllm_config))
    steps = min(int(figures()["gpu"]["steps"]), spec.max_denoising_steps)
    extra = spec.extra_async_passes()
    pays = asynchronous_pays(times, steps, extra)
    if not pays:
        scheduler_config.async_scheduling = False
    logger.info(
        "%s scheduling: %d passes of about %.1f ms for a canvas of %d steps, against %d of %.1f ms in "
        "the other order (%s); --async-scheduling and --no-async-scheduling set it.",
        "asynchronous" if pays else "synchronous",
        steps + extra * pays,
        times.asynchronous if pays else times.synchronous,
        steps,
        steps + extra * (not pays),
        times.synchronous if pays else times.asynchronous,
        "measured with the shipped checkpoint"
        if current_platform.is_cpu()
        else "estimated from the weights' bytes",
    )
