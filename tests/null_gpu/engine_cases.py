"""Engines on the null GPU, each in a fork of a process that has imported vLLM.

The content of an answer means nothing there, since kernels compute no values; an engine must answer
at all. The cases set how many tokens a request emits where the host reads it, since memory that no
kernel writes holds anything.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.support.null_gpu.counts import counts_of, summary
from tests.support.null_gpu.forks import RUNTIME

PROMPT = [7, 8, 9, 10, 11, 12, 13]
# A request emits its tokens in every so many passes.
PASSES_A_CANVAS = 4
# Requests whose names begin so never emit any, which keeps their passes alike.
UNDECIDED = ("constrained", "steady")
# What never emits is aborted after as many passes.
MOST_PASSES = 40
# Steps of the canvases, tokens of the prompts and loads with which rows are counted.
STEPS = (12, 16, 20)
PROMPT_LENGTHS = (100, 700, 2048, 4096)
REQUESTS_AT_ONCE = (1, 8, 32)
# Of a read, as vLLM's decisions ask for it.
ONE_STEP = {"diffusion_read_only": True, "diffusion_max_steps": 1}
# Of requests, by a name.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "read": {"logprob_token_ids": [40, 41], "extra_args": ONE_STEP},
    "held read": {
        "logprob_token_ids": [40, 41],
        "extra_args": ONE_STEP | {"diffusion_constrained": True},
    },
    "constrained": {"structured_outputs": {"regex": "[a-c]{3,5}"}},
    "watched": {
        "extra_args": {
            "diffusion_frames": 1,
            "diffusion_frame_fields": ["token_ids", "kept", "entropy"],
            "diffusion_step_map": True,
        }
    },
}

# With a picture between its tokens, which MinerU-Diffusion's image token stands for.
PICTURED = "pictured"

# Of requests that choose their way, where the server has several.
WAYS: dict[str, dict[str, Any]] = {
    "drafted": {"extra_args": {"diffusion_rule": "linear_spec"}},
    "causal": {"extra_args": {"diffusion_rule": "autoregressive"}},
}


def start(model: str, **options: Any) -> Any:
    """Start an engine with a server's defaults, except for short sequences and little memory.

    The number of requests and of a pass's tokens are a server's, since the sizes that are captured
    follow from them.
    """
    from vllm import LLM
    from vllm.entrypoints import llm
    from vllm.usage.usage_lib import UsageContext

    small: dict[str, Any] = {
        "max_model_len": 512,
        "gpu_memory_utilization": 0.1,
        "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
    }
    options = small | options
    as_served = SimpleNamespace(LLM_CLASS=UsageContext.OPENAI_API_SERVER)
    with patch.object(llm, "UsageContext", as_served):
        return LLM(model, **options)


def serve(
    model: str,
    options: dict[str, Any],
    kinds: list[str],
    steady: list[str] = (),
    adapter: str | None = None,
    every_row: bool = False,
) -> dict[str, Any]:
    """Start an engine and send two requests of each kind.

    Args:
        model: Folder of the checkpoint.
        options: Of the engine.
        kinds: Of requests, one after the other.
        steady: Of those, kinds of which a pass in steady state is counted too.
        adapter: Folder of a LoRA adapter that the requests have.
        every_row: Runs passes of every number of rows too.

    Returns:
        What was chosen at the start; by kind the passes, and the tokens of each request that was
        answered; by kind what a steady pass asks of the driver; the result of
        :func:`every_number_of_rows`.
    """
    decide_outcomes()
    llm = start(model, **options)
    runner = runner_of(llm)
    config = runner.vllm_config
    compilation = config.compilation_config
    return {
        "chosen": {
            "state": type(runner.model_state).__name__,
            "graphs": str(compilation.cudagraph_mode),
            "capture_sizes": list(compilation.cudagraph_capture_sizes),
            "asynchronous": config.scheduler_config.async_scheduling,
            "attention": sorted({type(layer).__name__ for layer in attention_layers(compilation)}),
            **kernels_of(config),
        },
        "requests": {kind: passes_of(llm, kind, adapter) for kind in kinds},
        "steady": {kind: steady_pass(llm, kind) for kind in steady},
        "every_row": every_number_of_rows(llm) if every_row else None,
    }


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Answer requests with true values.

    Args:
        job: An engine and batches of requests; see
            :func:`tests.support.engines.generate.run_engine`.

    Returns:
        What each request of each batch was answered; how many graphs were replayed; kernels that
        computed nothing, by name.
    """
    from vllm import LLM

    from tests.support.engines.generate import run_batches
    from tests.support.null_gpu import true_values

    true_values.compute()
    llm = LLM(**job["engine"])
    answers: list[Any] = []
    counts = counts_of(lambda: answers.extend(run_batches(llm, job)))
    return {
        "batches": answers,
        "graphs": summary(counts)["graphs"],
        "launched": [what for what in counts if "kernel " in what],
    }


def decide_outcomes() -> None:
    """Give the passes of this process outcomes, instead of what the memory happens to hold."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    stock = AsyncOutput.get_output
    passes: Counter[str] = Counter()

    def get_output(self: Any) -> Any:
        for row, request_id in enumerate(self.model_runner_output.req_ids):
            passes[request_id] += 1
            emits = passes[request_id] % PASSES_A_CANVAS == 0
            emits = emits and not request_id.startswith(UNDECIDED)
            self.num_sampled_tokens_np[row] = self.sampled_token_ids.shape[1] if emits else 0
            if request_id.startswith("causal"):
                self.num_sampled_tokens_np[row] = 1
        self.sampled_token_ids[:] = 0
        return stock(self)

    AsyncOutput.get_output = get_output


def worker_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker


def runner_of(llm: Any) -> Any:
    return worker_of(llm).model_runner


def kernels_of(config: Any) -> dict[str, Any]:
    """Return the kinds of the attention layers, as the model and ``doctor --gpu`` have them."""
    from vllm_diffusion.attention.backend import CanvasAttentionImpl
    from vllm_diffusion.cli.kernel_cases import Served
    from vllm_diffusion.startup.plan import spec_of

    layers = attention_layers(config.compilation_config)
    ours = [layer for layer in layers if isinstance(layer, CanvasAttentionImpl)]
    if spec_of(config.model_config) is None:
        return {}
    return {
        "kinds": sorted({layer.kind[0].name for layer in ours}),
        "checked_kinds": sorted(kind.name for kind in Served.of(config).kinds),
    }


def attention_layers(compilation: Any) -> list[Any]:
    layers = compilation.static_forward_context.values()
    return [layer.impl for layer in layers if hasattr(layer, "impl")]


def params_of(kind: str, **changes: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    asked |= {"detokenize": False} | (KINDS | WAYS | {PICTURED: {}})[kind] | changes
    if "structured_outputs" in asked:
        asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
        asked |= {"ignore_eos": False, "detokenize": True}
    return SamplingParams(**asked)


def passes_of(llm: Any, kind: str, adapter: str | None = None) -> dict[str, Any]:
    """Run two requests until they are answered or have had their passes."""
    from vllm.lora.request import LoRARequest

    from vllm_diffusion.live.watch import Inbox, opened
    from vllm_diffusion.scheduling.canvas_reports import CanvasReports

    engine = llm.llm_engine
    views = 0
    observe = CanvasReports._observe_view

    def observing(*args: Any) -> None:
        nonlocal views
        views += 1
        observe(*args)

    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
    ids = [f"{kind} {i}" for i in range(2)]
    with opened(Inbox()):
        for request_id in ids:
            engine.add_request(request_id, prompt_of(kind), params_of(kind), lora_request=lora)
    answered: dict[str, int] = {}
    passes = 0
    with patch.object(CanvasReports, "_observe_view", observing):
        while passes < MOST_PASSES and len(answered) < len(ids):
            passes += 1
            for output in engine.step():
                if output.finished:
                    answered[output.request_id] = len(output.outputs[0].token_ids)
    drop(engine, [request_id for request_id in ids if request_id not in answered])
    return {"passes": passes, "tokens": sorted(answered.values()), "views": views}


def prompt_of(kind: str) -> dict[str, Any]:
    """Return the prompt of a kind of request."""
    if kind != PICTURED:
        return {"prompt_token_ids": PROMPT}
    from tests.support.families.mineru_model import IMAGE_ID, picture

    ids = [*PROMPT[:3], IMAGE_ID, *PROMPT[3:]]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(40, 24)}}


def steady_pass(llm: Any, kind: str) -> dict[str, int]:
    """Count the driver's calls in a pass of three requests, after all compilations and allocations.

    Args:
        llm: The engine.
        kind: Of the requests; ``mixed`` for one that is denoised and one of each other way.
    """
    from vllm_diffusion.startup.plan import spec_of

    if "read" in kind:
        return pass_of_reads(llm, kind)
    engine, spec = llm.llm_engine, spec_of(runner_of(llm).vllm_config.model_config)
    # Drafts that keep nothing for some passes end their requests.
    kept = {"drafted": "verified", "causal": "causal"}
    usual = "verified" if spec is not None and spec.layout.verifies else "steady"
    kinds = ["plain", *WAYS] if kind == "mixed" else [kind] * 3
    ids = [f"{kept.get(each, usual)} {each} {i}" for i, each in enumerate(kinds)]
    # Whole sequences of three requests within the sizes that are captured.
    max_tokens = 100 if spec is not None and spec.layout.recomputes else 300
    for request_id, each in zip(ids, kinds, strict=True):
        params = params_of(each, max_tokens=max_tokens)
        engine.add_request(request_id, prompt_of(each), params)
    for _ in range(6):
        engine.step()
    step: Callable[[], object] = engine.step
    counted = [summary(counts_of(step)) for _ in range(6)]
    assert engine.get_num_unfinished_requests() == len(ids), (
        "a request has ended: nothing is steady"
    )
    drop(engine, ids)
    return least_of(counted)


def pass_of_reads(llm: Any, kind: str) -> dict[str, int]:
    """Count the driver's calls in the only pass of three reads whose prompts are not cached."""
    engine = llm.llm_engine
    counted = []
    for repeat in range(4):
        ids = [f"steady {kind} {repeat} {i}" for i in range(3)]
        for i, request_id in enumerate(ids):
            prompt = {"prompt_token_ids": [40 + repeat, 50 + i, *PROMPT]}
            engine.add_request(request_id, prompt, params_of(kind))
        counted.append(summary(counts_of(engine.step)))
        drop(engine, ids)
    return least_of(counted)


def least_of(counted: list[dict[str, int]]) -> dict[str, int]:
    """Return the least of some passes, as now and then the host waits for one event more."""
    return {what: min(counts[what] for counts in counted) for what in counted[0]}


def drop(engine: Any, request_ids: list[str]) -> None:
    """Abort requests, and let the passes that are on their way end."""
    engine.abort_request(request_ids)
    for _ in range(3):
        engine.step()


def every_number_of_rows(llm: Any) -> dict[str, Any]:
    """Run passes with prompts, of every number of rows up to the third captured size after a gap.

    Up to there each number has a graph. A prompt is as long as its model knows, the rest is another
    request's. They share no block of the cache.

    Returns:
        ``most``, the last of those sizes; ``sizes``, all of them; ``rows``, how many the passes
        had, by kind of graph.
    """
    engine, runner = llm.llm_engine, runner_of(llm)
    config = runner.vllm_config
    sizes = sorted(config.compilation_config.cudagraph_capture_sizes)
    beyond = [size for low, size in pairwise(sizes) if size - low > sizes[0]]
    most = (beyond or sizes)[:3][-1]
    longest = config.model_config.max_model_len - 2 * config.diffusion_config.canvas_length
    rows: dict[str, set[int]] = {}
    prepare = runner.model_state.prepare_attn

    def prepare_attn(input_batch: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        rows.setdefault(mode.name, set()).add(input_batch.num_tokens)
        return prepare(input_batch, mode, *args, **kwargs)

    with patch.object(runner.model_state, "prepare_attn", prepare_attn):
        for num_tokens in range(1, most + 1):
            ids = []
            for first in range(0, num_tokens, longest):
                ids.append(f"steady {num_tokens} {first}")
                length = min(longest, num_tokens - first)
                own = [7 + num_tokens % 100, 7 + num_tokens // 100, 7 + len(ids)]
                prompt = {"prompt_token_ids": (own * length)[:length]}
                engine.add_request(ids[-1], prompt, params_of("plain"))
            engine.step()
            drop(engine, ids)
    return {
        "most": most,
        "sizes": sizes,
        "rows": {mode: sorted(counts) for mode, counts in rows.items()},
    }


def serve_from_another_process(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Send requests to an engine in a process of its own, which must still answer calls afterwards.

    A canvas that never converges sends nothing from there, so that its passes cannot be counted
    here.
    """
    llm = start(model, **options)
    engine = llm.llm_engine
    for kind in ("plain", "top_p"):
        engine.add_request(kind, {"prompt_token_ids": PROMPT}, params_of(kind))
    stepping = threading.Thread(target=_step_until_done, args=(engine,), daemon=True)
    stepping.start()
    stepping.join(20)
    return {"tasks": list(engine.engine_core.get_supported_tasks())}


def _step_until_done(engine: Any) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def sleep(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run requests before and after each level of sleep; return the MiB that it frees."""
    import torch
    from vllm.distributed.device_communicators import cuda_wrapper

    # Of several runtimes in a process vLLM calls the first by its address: torchvision brings one.
    cuda_wrapper.find_loaded_library = lambda name: RUNTIME
    decide_outcomes()
    llm = start(model, **options)
    passes_of(llm, "plain")
    given_back = {}
    for level in (1, 2):
        before = torch.cuda.mem_get_info()[0]
        llm.sleep(level=level)
        given_back[f"level {level}"] = (torch.cuda.mem_get_info()[0] - before) >> 20
        llm.wake_up()
        if level == 1:
            passes_of(llm, "plain")
    return {"given_back_mib": given_back}


def _leave_out_cute() -> None:
    """Route experts without vLLM's CuTe kernels, whose CUDA runtime a null GPU lacks."""
    from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16, ll_fp32w

    for kernel in (ll_bf16, ll_fp32w):
        setattr(kernel, "is_available", lambda: False)  # noqa: B010 - a module's function


def start_shape(model: str, options: dict[str, Any]) -> Any:
    """Start an engine of a large shape, with dummy weights."""
    _give_scales()
    _leave_out_cute()
    decide_outcomes()
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.92}
    return start(model, **(defaults | options))


def serve_shape(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start a large shape with dummy weights; return its memory and its calls to the driver."""
    import torch

    llm = start_shape(model, options)
    worker = worker_of(llm)
    runner = worker.model_runner
    config = runner.vllm_config
    attention = Counter(
        type(layer).__name__ for layer in attention_layers(config.compilation_config)
    )
    return {
        "attention": dict(attention),
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "capture_sizes": list(config.compilation_config.cudagraph_capture_sizes),
        "bytes": {
            "device": torch.cuda.mem_get_info()[1],
            "weights": runner.model_memory_usage,
            "largest pass": worker.peak_activation_memory - worker.cudagraph_memory_estimate,
            "graphs": worker.cudagraph_memory_estimate,
            "kv cache": int(worker.available_kv_cache_memory_bytes),
            "free": torch.cuda.mem_get_info()[0],
        },
        "kv_cache_tokens": config.cache_config.kv_cache_size_tokens,
        "steady": {"plain": steady_pass(llm, "plain")},
    }


def count_rows(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Count rows and products per token of a shape with dummy weights, at several loads."""
    from tests.support.counters.row_counts import RowCounter, RowCounts, serve

    llm = start(model, load_format="dummy", skip_tokenizer_init=True, **options)
    _decide_by_steps(runner_of(llm))
    counter = RowCounter(llm)
    found = {}
    for at_once in REQUESTS_AT_ONCE:
        counter.counts = RowCounts()
        requests = [
            (
                [7] * PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)],
                params_of("plain", max_tokens=512, seed=i),
            )
            for i in range(max(2 * at_once, len(PROMPT_LENGTHS)))
        ]
        num_tokens = sum(len(output.token_ids) for output in serve(llm, requests, at_once))
        found[f"{at_once} at once"] = {"tokens": num_tokens, **asdict(counter.counts)}
    return found


def _decide_by_steps(runner: Any) -> None:
    """Let the canvases of each request converge after different numbers of steps."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    stock, prepare = AsyncOutput.get_output, runner.model_state.prepare_attn
    extra = int(runner.vllm_config.scheduler_config.async_scheduling)
    # Of each pass on its way, the requests that have a canvas in it.
    on_their_way: deque[set[str]] = deque()
    passes: Counter[str] = Counter()
    canvases: Counter[str] = Counter()

    def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        num_canvas = np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1])
        named = zip(input_batch.req_ids, num_canvas, strict=True)
        on_their_way.append({request_id for request_id, num_rows in named if num_rows})
        return prepare(input_batch, *args, **kwargs)

    def get_output(self: Any) -> Any:
        has_canvas = on_their_way.popleft()
        for row, request_id in enumerate(self.model_runner_output.req_ids):
            passes[request_id] += request_id in has_canvas
            index = int(request_id.split()[1].partition("-")[0]) + canvases[request_id]
            emits = passes[request_id] == STEPS[index % len(STEPS)] + extra
            self.num_sampled_tokens_np[row] = self.sampled_token_ids.shape[1] if emits else 0
            if emits:
                passes[request_id] = 0
                canvases[request_id] += 1
        self.sampled_token_ids[:] = 0
        return stock(self)

    runner.model_state.prepare_attn = prepare_attn
    AsyncOutput.get_output = get_output


def _give_scales() -> None:
    """Put 1.0 for the scales of an FP8 cache, which nothing fills on the null GPU."""
    import torch
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    stock = BaseKVCacheMethod.process_weights_after_loading

    def with_scales(self: Any, layer: torch.nn.Module) -> None:
        for name in ("k_scale", "v_scale", "q_scale", "prob_scale"):
            if hasattr(layer, name):
                on_host = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
                setattr(layer, name, on_host)
        stock(self, layer)

    BaseKVCacheMethod.process_weights_after_loading = with_scales
