"""Default number of requests that run at once, by an estimate of memory.

Stock vLLM sets 8 for this architecture, since its sampler holds whole logits of every canvas, and
does not distinguish an operator's number from its own default. Our sampler holds a tile of logits
at a time, so that a request costs the rows of its slot and its KV cache. Everything here is an
estimate made before anything is loaded; vLLM logs the real size of the KV cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_diffusion.startup.host_memory import checkpoint_bytes

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.vllm_diffusion")

# Tokens of a request's context that are counted. Longer ones are served too: they wait for blocks,
# as under any setting.
TYPICAL_CONTEXT = 4096
# Number of stock vLLM. Short requests need less than the estimate, and a slot without a request
# costs megabytes.
FEWEST = 8
# Running canvases leave one in this many of a pass's tokens to prompts. Otherwise a prompt beside a
# full batch gets the room of one canvas, 256 tokens per pass, and each pass with a prompt is slower
# for all.
PROMPTS_SHARE = 4
# The sampler's tiles (a byte for each logit of a pass at most: 2 GiB for 8,192 rows of 262,144 ids),
# a pass's activations and captured graphs. Not measured.
RESERVED_BYTES = 4 * 1024**3
# Per canvas position and slot: three canvases of tokens and a flag, four statistics of a step, the
# runner's draft token.
_POSITION_BYTES = 3 * 8 + 1 + 2 * 8 + 2 * 4 + 8
# Per slot: the request's end tokens and its settings.
_REQUEST_BYTES = 128 * 8 + 64


@dataclass(frozen=True)
class RequestCost:
    """Cost of a request on one rank, in bytes.

    Attributes:
        state: Bytes of a slot, used or not.
        kv: Bytes of a running request's KV cache.
    """

    state: int
    kv: int


@dataclass(frozen=True)
class Memory:
    """Memory of one rank in bytes, without the weights.

    Attributes:
        free: Bytes for everything that ``kv`` does not hold.
        kv: Bytes reserved for the KV cache; ``None`` if it takes the rest of ``free``.
    """

    free: int
    kv: int | None = None


# Memory that never limits the choice, which then depends on the rows of a pass.
_AMPLE = Memory(2**62)


def carried_requests(memory: Memory, cost: RequestCost) -> int:
    """Return the number of requests of the typical length that fit in memory."""
    if memory.kv is None:
        return max(memory.free, 0) // (cost.state + cost.kv)
    return min(memory.kv // cost.kv, max(memory.free, 0) // cost.state)


def choose_max_num_seqs(
    memory: Memory, cost: RequestCost, canvases_per_pass: int, most: int
) -> int:
    """Choose the default number of requests that run at once.

    Args:
        memory: Available memory.
        cost: Cost of a request.
        canvases_per_pass: Canvases that ``max_num_batched_tokens`` holds; more requests than that
            would take turns.
        most: vLLM's default for other models.

    Returns:
        A number of at least 1, and of at least ``FEWEST`` if their slots fit and
        ``canvases_per_pass`` and ``most`` allow it. It leaves prompts their share of a pass, unless
        that is below ``FEWEST``.
    """
    fewest = min(FEWEST, max(memory.free, 0) // cost.state)
    running = max(
        min(FEWEST, canvases_per_pass), canvases_per_pass - canvases_per_pass // PROMPTS_SHARE
    )
    return max(1, min(most, running, max(fewest, carried_requests(memory, cost))))


def slot_bytes(*, canvas_length: int, hidden_size: int, vocab_size: int, dtype_bytes: int) -> int:
    """Return the bytes of one row of every per-request tensor, ours and the runner's."""
    soft_embeds = canvas_length * hidden_size * dtype_bytes
    # vLLM's penalties: the count of each token in the answer, and a bit for the prompt.
    penalties = vocab_size * 4 + -(-vocab_size // 32) * 4
    return soft_embeds + canvas_length * _POSITION_BYTES + penalties + _REQUEST_BYTES


def kv_bytes(
    text_config: Any,
    *,
    context: int,
    canvas_length: int,
    tp: int,
    kv_bytes: int,
    stages: Sequence[slice] = (slice(None),),
) -> int:
    """Return the bytes of a request's KV cache on one rank, of the largest pipeline stage.

    Args:
        text_config: The checkpoint's text configuration.
        context: Tokens of the request, canvas included.
        canvas_length: Tokens of a canvas.
        tp: Ranks that share the heads.
        kv_bytes: Bytes of one element of the cache.
        stages: Layers of each stage.
    """
    layers = []
    for layer in attention_layers(text_config):
        tokens = context
        if layer.window is not None:
            # A canvas that is encoded and the next one see the window before them.
            tokens = min(context, layer.window + 2 * canvas_length)
        heads = max(layer.num_key_value_heads // tp, 1)
        layers.append(2 * heads * layer.head_dim * kv_bytes * tokens)
    return max(sum(layers[stage]) for stage in stages)


class AttentionLayer(NamedTuple):
    """A layer's part of the KV cache; ``window`` in tokens, ``None`` for full attention."""

    num_key_value_heads: int
    head_dim: int
    window: int | None


def attention_layers(text_config: Any) -> list[AttentionLayer]:
    """List the attention layers of a configuration of transformers, equal or not (Gemma 4)."""
    num_layers = text_config.num_hidden_layers
    own = getattr(text_config, "per_layer_config", None) or [text_config] * num_layers
    types = getattr(text_config, "layer_types", None) or ["full_attention"] * num_layers
    return [
        AttentionLayer(
            layer.num_key_value_heads,
            getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
            text_config.sliding_window if kind == "sliding_attention" else None,
        )
        for layer, kind in zip(own, types, strict=True)
    ]


def text_parameters(text_config: Any) -> int:
    """Return the number of parameters of the language model, without norms."""
    hidden, heads = text_config.hidden_size, text_config.num_attention_heads
    per_layer = 3 * hidden * text_config.intermediate_size
    experts = getattr(text_config, "num_experts", None) or 0
    if experts:
        per_layer += experts * hidden * (1 + 3 * text_config.moe_intermediate_size)
    layers = attention_layers(text_config)
    attention = sum(
        2 * hidden * layer.head_dim * (heads + layer.num_key_value_heads) for layer in layers
    )
    return text_config.vocab_size * hidden + len(layers) * per_layer + attention


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
    memory, cost = _memory(vllm_config), _cost(vllm_config)
    budget = scheduler_config.max_num_batched_tokens
    canvas_length = vllm_config.diffusion_config.canvas_length
    most = choose_max_num_seqs(_AMPLE, cost, budget // canvas_length, given)
    chosen = choose_max_num_seqs(memory, cost, budget // canvas_length, given)
    # The scheduler must not run more than the runner has slots for.
    chosen = max(chosen, scheduler_config.max_num_active_seqs or 0)
    scheduler_config.max_num_seqs = chosen
    # vLLM logs the real capacity once memory is allocated, so the estimate is logged only if it
    # decides.
    if chosen < most:
        logger.info(
            "max_num_seqs=%d, of %d that max_num_batched_tokens=%d would run: by an estimate of memory, in "
            "which a request of %d tokens takes %.1f MiB of state and %.1f MiB of KV cache; "
            "--max-num-seqs sets another number.",
            chosen,
            most,
            budget,
            _context(vllm_config),
            cost.state / 2**20,
            cost.kv / 2**20,
        )
        return
    logger.info(
        "max_num_seqs=%d: max_num_batched_tokens=%d holds %d canvases of %d, of which prompts are left "
        "%d; --max-num-seqs sets another number.",
        chosen,
        budget,
        budget // canvas_length,
        canvas_length,
        max(budget // canvas_length - chosen, 0),
    )


def _context(vllm_config: VllmConfig) -> int:
    return min(vllm_config.model_config.max_model_len, TYPICAL_CONTEXT)


def _cost(vllm_config: VllmConfig) -> RequestCost:
    model_config = vllm_config.model_config
    text_config = model_config.hf_text_config
    canvas_length = vllm_config.diffusion_config.canvas_length
    cache_dtype = vllm_config.cache_config.cache_dtype
    return RequestCost(
        state=slot_bytes(
            canvas_length=canvas_length,
            hidden_size=text_config.hidden_size,
            vocab_size=model_config.get_vocab_size(),
            dtype_bytes=model_config.dtype.itemsize,
        ),
        kv=kv_bytes(
            text_config,
            context=_context(vllm_config),
            canvas_length=canvas_length,
            tp=vllm_config.parallel_config.tensor_parallel_size,
            kv_bytes=1 if cache_dtype.startswith("fp8") else model_config.dtype.itemsize,
            stages=_stages(vllm_config),
        ),
    )


def _stages(vllm_config: VllmConfig) -> list[slice]:
    """Return the layers of each pipeline stage; more stages than layers are refused later."""
    from vllm.distributed.utils import get_pp_indices

    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    num_stages = min(vllm_config.parallel_config.pipeline_parallel_size, num_layers)
    return [slice(*get_pp_indices(num_layers, i, num_stages)) for i in range(num_stages)]


def _memory(vllm_config: VllmConfig) -> Memory:
    from vllm.platforms import current_platform

    cache_config = vllm_config.cache_config
    if current_platform.is_cpu():
        import psutil

        from vllm_diffusion.startup.host_memory import kv_cache_bytes

        # Engines on this machine share it.
        num_engines = max(vllm_config.parallel_config.data_parallel_size_local, 1)
        available: int = psutil.virtual_memory().available // num_engines
        kv = kv_cache_bytes(cache_config)
        return Memory(available - kv - weight_bytes(vllm_config) - RESERVED_BYTES, kv)
    total = current_platform.get_device_total_memory() * cache_config.gpu_memory_utilization
    free = int(total) - weight_bytes(vllm_config) - RESERVED_BYTES
    kv = cache_config.kv_cache_memory_bytes
    return Memory(free) if kv is None else Memory(free - kv, kv)


def weight_bytes(vllm_config: VllmConfig) -> int:
    """Return the bytes of weights on one rank: of local files, else the unquantised upper bound."""
    model_config = vllm_config.model_config
    size = checkpoint_bytes(model_config.model)
    if size == 0:
        size = text_parameters(model_config.hf_text_config) * model_config.dtype.itemsize
    parallel = vllm_config.parallel_config
    return size // (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
