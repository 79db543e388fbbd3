"""Choices where the operator makes none: size and order of passes, workers and scheduler, back ends that compile,
images and videos, and which blocks of the cache stay.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_diffusion.startup.machine import checkpoint_bytes, has_cpp_compiler

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_diffusion.decoding.canvas_spec import CanvasSpec


def compile_backend(vllm_config: VllmConfig) -> str | None:
    """Return the backend of ``torch.compile`` for the decision step, ``None`` to run it eagerly.

    It runs eagerly if the operator asks for it, and on a CPU without a C++ compiler.
    """
    from vllm.platforms import current_platform

    if vllm_config.model_config.enforce_eager:
        return None
    if current_platform.is_cpu():
        return "inductor" if has_cpp_compiler() else None
    return str(current_platform.simple_compile_backend)


def launch_backend(vllm_config: VllmConfig) -> str | None:
    """Return the backend for the small functions around a step, ``None`` on a CPU.

    Each computes a few numbers per request or row; compiled, it takes a GPU one launch instead of
    twenty. A CPU has no launches, and would compile for seconds what it runs in microseconds.
    """
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else compile_backend(vllm_config)


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


# Beyond this many canvases a launch costs nothing beside the work it starts.
MAX_CANVASES = 64
# Up to here every count has a graph of the backbone; above, every second, and the runner pads: by one
# canvas in 17 at most.
MAX_EXACT = 16
# Rows of a tile of a matrix product, which takes as long with fewer. Passes of short canvases are
# padded to whole ones.
TILE_ROWS = 128


def canvas_counts(canvas_length: int, most: int) -> list[int]:
    """Numbers of canvases that get a graph of the backbone, ascending, up to ``most``."""
    most = min(most, MAX_CANVASES)
    step = max(2, TILE_ROWS // canvas_length)
    return sorted({*range(1, min(most, MAX_EXACT) + 1), *range(step, most + 1, step), most})


def capture_sizes(canvas_length: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Rows of the passes that vLLM is to capture.

    Whole canvases of 1 to ``max_num_seqs`` requests, and up to twice as many where finished canvases
    are encoded in the same pass. Short prompts take the smallest of them.

    Args:
        canvas_length: Rows of a canvas.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Rows of the largest pass.
    """
    counts = canvas_counts(canvas_length, 2 * max_num_seqs)
    return [n * canvas_length for n in counts if n * canvas_length <= max_num_batched_tokens]


def choose_capture_sizes(vllm_config: VllmConfig) -> None:
    """Have vLLM capture whole canvases, where the operator says nothing of sizes.

    By itself it stops at 512 rows (1,024 on SM100), which is two canvases of 256.
    """
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    if (
        current_platform.is_cpu()
        or compilation.cudagraph_capture_sizes is not None
        or compilation.max_cudagraph_capture_size is not None
    ):
        return
    scheduler = vllm_config.scheduler_config
    compilation.cudagraph_capture_sizes = capture_sizes(
        vllm_config.diffusion_config.canvas_length,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
    )


logger = logging.getLogger("vllm.vllm_diffusion")

# Running canvases leave one in this many of a pass's tokens to prompts. Otherwise a prompt beside a
# full batch gets the room of one canvas, 256 tokens per pass, and each pass with a prompt is slower
# for all.
PROMPTS_SHARE = 4
# Number of stock vLLM, below which prompts get no share.
FEWEST = 8


def choose_max_num_seqs(canvases_per_pass: int, most: int) -> int:
    """Choose the default number of requests that run at once.

    Stock vLLM sets 8 for this architecture, since its sampler holds whole logits of every canvas, and
    does not distinguish an operator's number from its own default. Our sampler holds a tile of logits
    at a time, so that a pass's tokens limit the number. Memory does not: vLLM profiles a pass with the
    slots of all requests in place, gives the rest to the KV cache, and logs how many requests it holds;
    those beyond wait.

    Args:
        canvases_per_pass: Canvases that ``max_num_batched_tokens`` holds; more requests than that
            would take turns.
        most: vLLM's default for other models.

    Returns:
        A number of at least 1. It leaves prompts their share of a pass, unless it would be below
        ``FEWEST``.
    """
    running = canvases_per_pass - canvases_per_pass // PROMPTS_SHARE
    return max(1, min(most, max(running, min(FEWEST, canvases_per_pass))))


def note_given_limits(arguments: EngineArgs, model_config: ModelConfig) -> None:
    """Note on a diffusion model whether the operator set the requests and the tokens of a pass.

    vLLM replaces ``None`` by a default before any hook that is given the whole configuration.

    Args:
        arguments: vLLM's arguments, without defaults yet.
        model_config: Configuration of the model, changed in place.
    """
    if model_config.is_diffusion:
        model_config.max_num_seqs_is_set = arguments.max_num_seqs is not None
        is_set = arguments.max_num_batched_tokens is not None
        model_config.max_num_batched_tokens_is_set = is_set


def set_max_num_seqs(vllm_config: VllmConfig, given: int) -> None:
    """Set the default, and log the reason; an operator's number stays as it is.

    Args:
        vllm_config: Configuration, changed in place.
        given: ``max_num_seqs`` before the stock hook lowered it.
    """
    scheduler_config = vllm_config.scheduler_config
    scheduler_config.max_num_seqs = given
    if getattr(vllm_config.model_config, "max_num_seqs_is_set", True):
        return
    budget = scheduler_config.max_num_batched_tokens
    canvas_length = vllm_config.diffusion_config.canvas_length
    canvases = budget // canvas_length
    # The scheduler must not run more than the runner has slots for.
    chosen = max(choose_max_num_seqs(canvases, given), scheduler_config.max_num_active_seqs or 0)
    scheduler_config.max_num_seqs = chosen
    logger.info(
        "max_num_seqs=%d: max_num_batched_tokens=%d holds %d canvases of %d, of which prompts are left "
        "%d; --max-num-seqs sets another number.",
        chosen,
        budget,
        canvases,
        canvas_length,
        max(canvases - chosen, 0),
    )


def choose_media(vllm_config: VllmConfig) -> None:
    """Offer no image or video that ``max_num_batched_tokens`` cannot hold; refuse a requested one.

    The rows of an image attend to one another in both directions, so they are computed in one pass.
    vLLM checks this only when its engine is up, and then names only one of the two options.

    Raises:
        ValueError: If ``--limit-mm-per-prompt`` asks for an item that does not fit, with the
            smallest budget that holds it, and the setting that leaves it out.
    """
    from vllm.config import MultiModalConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model_config = vllm_config.model_config
    if not model_config.is_mm_prefix_lm:
        return
    info = MULTIMODAL_REGISTRY.create_processor(model_config).info
    counts = {kind: 1 for kind, most in info.allowed_mm_limits.items() if most > 0}
    lengths = info.get_mm_max_tokens_per_item(model_config.max_model_len, counts)
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    too_long = {kind: lengths[kind] for kind in counts if lengths[kind] > budget}
    if not too_long:
        return
    is_set = getattr(model_config, "max_num_batched_tokens_is_set", True)
    given = "" if is_set else " (unset, at most max_num_seqs * max_model_len)"
    multimodal = model_config.get_multimodal_config()
    requested = {
        kind: length for kind, length in too_long.items() if kind in multimodal.limit_per_prompt
    }
    if requested:
        raise ValueError(
            f"max_num_batched_tokens={budget}{given} is too "
            f"little for {_items(requested)}, which --limit-mm-per-prompt asks for and one pass must "
            f"hold; set --max-num-batched-tokens to at least {max(requested.values())}, or do "
            f"without: --limit-mm-per-prompt '{json.dumps(dict.fromkeys(requested, 0))}'."
        )
    none_of_them = MultiModalConfig(limit_per_prompt=dict.fromkeys(too_long, 0))
    multimodal.limit_per_prompt.update(none_of_them.limit_per_prompt)
    logger.warning(
        "max_num_batched_tokens=%d%s does not hold %s, "
        "which one pass must: requests with one are refused; --max-num-batched-tokens of at least %d "
        "serves them.",
        budget,
        given,
        _items(too_long),
        max(too_long.values()),
    )


def _items(lengths: Mapping[str, int]) -> str:
    """Describe items, as in ``an image of up to 280 tokens and a video of up to 2496 tokens``."""
    return " and ".join(
        f"{'a' if kind == 'video' else 'an'} {kind} of up to {length} tokens"
        for kind, length in lengths.items()
    )


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
