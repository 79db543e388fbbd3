"""The cases of the rehearsal: starts of an engine on the null GPU, by descriptive names."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tests.null_gpu.engine_cases import KINDS
from tests.support.families.cases import CASES as FAMILIES
from tests.support.families.cases import checkpoint_of
from tests.support.models.checkpoints import SHIPPED, write_headers
from tests.support.null_gpu.processes import ROOT
from vllm_diffusion.checkpoints import shipped_checkpoint, shipped_draft

ENGINES = "tests.null_gpu.engine_cases"
# Graphs of few sizes, so that many starts are rehearsed; CI's starts have the defaults of a server.
FEW: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 512}
# Without Inductor: Dynamo, the split of its graph and the captures are those of a compiled start.
EAGER_BACKEND: dict[str, Any] = {"compilation_config": {"backend": "eager"}}
CAPTURED = FEW | EAGER_BACKEND
DIFFUSION = "diffusion"
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
# GPUs that people have at home: capability, the GiB that torch finds there less half of one, for
# the context that CUDA makes in each process and for a screen, and the file in
# ``examples/small-gpus`` that serves on it.
SMALL_GPUS = {
    "3090": ("8.6", 23.0, "24-gib"),
    "4090": ("8.9", 23.0, "24-gib"),
    "5090": ("12.0", 30.8, "32-gib"),
}
# vLLM's own kernels, where it takes by itself FlashInfer's, which are downloaded or compiled first,
# or Humming's, which read values at loading.
KERNELS = {
    ("bf16", "10.0"): {"moe_backend": "triton"},
    ("bf16", "12.0"): {"moe_backend": "triton"},
    ("nvfp4", "9.0"): {"moe_backend": "marlin", "linear_backend": "marlin"},
    ("nvfp4", "10.0"): {"moe_backend": "cutlass", "linear_backend": "cutlass"},
    ("nvfp4", "12.0"): {"moe_backend": "cutlass", "linear_backend": "cutlass"},
}
# What samples for autoregressive models: FlashInfer's sampler is compiled by nvcc first, with
# cuRAND's headers.
AUTOREGRESSIVE = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
PRESETS = ROOT / "examples/small-gpus"
# What only a server has, which answers over HTTP.
SERVER_OPTIONS = ("model", "reasoning_parser", "tool_call_parser", "enable_auto_tool_choice")


@dataclass(frozen=True)
class Case:
    """One start.

    Attributes:
        name: What it is called in the state and in the data.
        run: The function, of :mod:`tests.null_gpu.engine_cases`.
        arguments: Makes its arguments, given a folder for a checkpoint.
        capability: Of the device.
        gib: The device's memory; 0 for its chip's own.
        variables: Of the environment.
        refusal: Part of the message with which the start is refused, where it is.
    """

    name: str
    run: str
    arguments: Callable[[Path], dict[str, Any]]
    capability: str = "9.0"
    gib: float = 0
    variables: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None


def gemma(name: str, kinds: tuple[str, ...] = ("plain",), **options: Any) -> Case:
    """Return the shipped DiffusionGemma with options of the engine."""
    arguments = {
        "model": str(SHIPPED),
        "options": CAPTURED | options,
        "kinds": list(kinds),
        "steady": ["plain"],
    }
    return Case(name, f"{ENGINES}:serve", lambda folder: arguments)


def settings(**diffusion: Any) -> dict[str, Any]:
    return {"additional_config": {DIFFUSION: diffusion}}


def orders() -> Iterator[Case]:
    yield gemma("order: asynchronous", tuple(KINDS), async_scheduling=True)


def process_starts() -> Iterator[Case]:
    """Return starts of ``LLM(...)`` as in a script, with the engine in its own process."""
    arguments = {"model": str(SHIPPED), "options": FEW | {"enforce_eager": True}}
    yield Case(
        "LLM(...) with vLLM's default process start",
        f"{ENGINES}:serve_from_another_process",
        lambda folder: arguments,
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )


def families() -> Iterator[Case]:
    """Return each family with each of its rules, and the asynchronous order."""
    rules = {
        "llada2.0": ("reveal", "reveal_and_edit"),
        "llada2.2": ("levenshtein",),
        "nemotron": ("reveal", "linear_spec", "autoregressive"),
    }
    for family in FAMILIES:
        for rule in rules.get(family, (None,)):
            for asynchronous in (False, True):
                name = f"family: {family}, {rule or 'its rule'}"
                yield _family(name + ", asynchronous" * asynchronous, family, rule, asynchronous)


def _family(name: str, family: str, rule: str | None, asynchronous: bool) -> Case:
    def arguments(folder: Path) -> dict[str, Any]:
        model, options = checkpoint_of(family, folder)
        if rule is not None:
            options = settings(rule=rule)
        if asynchronous:
            options = options | {"async_scheduling": True}
        # The longest that all of these tiny models know.
        options = options | {"max_model_len": 256}
        return {"model": str(model), "options": CAPTURED | options, "kinds": ["plain", "top_p"]}

    variables = AUTOREGRESSIVE if rule == "autoregressive" else {}
    return Case(name, f"{ENGINES}:serve", arguments, variables=variables)


def drafts() -> Iterator[Case]:
    """Return stock's DFlash, ours of several passes, and ours with as many tokens as pay."""
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "stock's DFlash": {},
        "two passes": {"steps": 2},
        "two passes, adaptive": {"steps": 2, "adaptive": True},
    }
    for name, drafting in kinds.items():
        options: dict[str, Any] = dict(CAPTURED)
        if name != "none":
            options["speculative_config"] = {
                "method": "dflash",
                "model": str(shipped_draft()),
                # One less than its block.
                "num_speculative_tokens": 7,
            }
        if drafting:
            options["additional_config"] = {"drafting": drafting}
        arguments = {
            "model": str(shipped_checkpoint("qwen3")),
            "options": options,
            "kinds": ["plain", "top_p"],
            "steady": ["plain"],
        }
        yield Case(
            f"draft: {name}",
            f"{ENGINES}:serve",
            lambda folder, given=arguments: given,
            variables=AUTOREGRESSIVE,
        )


def features() -> Iterator[Case]:
    every = tuple(KINDS)
    yield gemma("attention: triton", every, **settings(attention="triton"))
    yield gemma("attention: reference", every, **settings(attention="reference"))
    yield gemma("attention: TRITON_ATTN", every, attention_backend="TRITON_ATTN")
    yield gemma("FP8 cache", every, kv_cache_dtype="fp8")
    yield replace(gemma("FP8 cache, 8.6", kv_cache_dtype="fp8"), capability="8.6")
    yield Case("LoRA", f"{ENGINES}:serve", _adapted)
    sleeping = {"model": str(SHIPPED), "options": CAPTURED | {"enable_sleep_mode": True}}
    yield Case("sleep, with graphs", f"{ENGINES}:sleep", lambda folder: sleeping)


def _adapted(folder: Path) -> dict[str, Any]:
    """Return requests with an adapter of every module, experts too."""
    from tests.support.models.adapters import CONDITIONING, DECODER, ENCODER, EXPERTS, adapt
    from tests.support.oracles.oracle import Oracle

    modules = f"{ENCODER}|{DECODER}|{CONDITIONING}"
    model = Oracle(SHIPPED).model
    adapt(model, folder / "adapter", target_modules=modules, target_parameters=EXPERTS)
    return {
        "model": str(SHIPPED),
        "options": CAPTURED | {"enable_lora": True, "max_lora_rank": 8},
        "kinds": list(KINDS),
        "steady": ["plain"],
        "adapter": str(folder / "adapter"),
    }


def published_shape() -> Iterator[Case]:
    """Return starts of the 26B shape with dummy weights, their kernels and memory."""
    for capability in CAPABILITIES:
        for weights in ("bf16", "fp8-dynamic", "nvfp4"):
            name = f"26B, {weights}, {capability}"
            gib = 80 if capability == "8.0" else 180
            # Eight requests, and graphs of whole passes alone: Dynamo, and the graphs of 48
            # requests in pieces, take most of the time of a start, and the small GPUs have them.
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            options: dict[str, Any] = {"max_num_seqs": 8, "compilation_config": graphs}
            options |= KERNELS.get((weights, capability), {})
            yield _shape(name, weights, capability, gib, **options)


# ``config.json`` of GSAI-ML/LLaDA-8B-Instruct, as far as it decides shapes.
LLADA_8B = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "activation_type": "silu",
    "weight_tying": False,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "torch_dtype": "bfloat16",
}


def whole_sequences() -> Iterator[Case]:
    """Return LLaDA-8B's shape with dummy weights, by default."""

    def arguments(folder: Path) -> dict[str, Any]:
        (folder / "llada").mkdir()
        (folder / "llada" / "config.json").write_text(json.dumps(LLADA_8B))
        return {"model": str(folder / "llada"), "options": dict(EAGER_BACKEND)}

    yield Case("LLaDA-8B, bf16, 9.0", f"{ENGINES}:serve_shape", arguments, "9.0", 80)


def small_gpus() -> Iterator[Case]:
    """Return what a GPU of 24 or 32 GiB fits with its file's options, and what it refuses."""
    for gpu, (capability, gib, preset) in SMALL_GPUS.items():
        for canvas in (256, 64):
            options = preset_options(preset) | {"diffusion_config": {"canvas_length": canvas}}
            name = f"26B, nvfp4-modelopt, a {gpu}, canvases of {canvas}"
            yield _shape(name, "nvfp4-modelopt", capability, gib, **options)
        yield _refused(f"26B, bf16, a {gpu}", "bf16", capability, gib, "The weights take 47.0 GiB")
    # The file's are for NVFP4.
    options = preset_options("32-gib") | {"moe_backend": "auto", "linear_backend": "auto"}
    yield _shape("26B, fp8-dynamic, a 5090", "fp8-dynamic", "12.0", 30.8, **options)
    yield _refused("26B, fp8-dynamic, a 4090", "fp8-dynamic", "8.9", 23.0, "The weights take 24.3")
    yield _refused("26B, nvfp4, a T4", "nvfp4", "7.5", 0, "compute capability 7.5")


def preset_options(name: str) -> dict[str, Any]:
    """Return the options of a file of ``examples/small-gpus``, as for ``vllm.LLM``."""
    given = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    options = {key.replace("-", "_"): value for key, value in given.items()}
    return {key: value for key, value in options.items() if key not in SERVER_OPTIONS}


def _refused(name: str, weights: str, capability: str, gib: float, refusal: str) -> Case:
    shape = _shape(name, weights, capability, gib)

    def arguments(folder: Path) -> dict[str, Any]:
        made = shape.arguments(folder)
        write_headers(Path(made["model"]))
        return made

    return replace(shape, arguments=arguments, refusal=refusal)


def _shape(name: str, weights: str, capability: str, gib: float, **options: Any) -> Case:
    def arguments(folder: Path) -> dict[str, Any]:
        from bench_formats import write_checkpoint

        return {
            "model": str(write_checkpoint(folder / "26b", "26b", weights)),
            "options": {"max_model_len": 32768, **EAGER_BACKEND, **options},
        }

    return Case(name, f"{ENGINES}:serve_shape", arguments, capability, gib)


def loads() -> Iterator[Case]:
    """Return rows per token of two layers of the 26B shape, at 1, 8 and 32 requests."""
    yield _rows("rows a token, asynchronous", async_scheduling=True)
    yield _rows("rows a token, fused", async_scheduling=False)


def _rows(name: str, **order: Any) -> Case:
    def arguments(folder: Path) -> dict[str, Any]:
        from bench_formats import write_checkpoint

        model = write_checkpoint(folder / "26b", "26b", "bf16")
        config = json.loads((model / "config.json").read_text())
        text = config["text_config"]
        # A sliding layer and a full one.
        text |= {"num_hidden_layers": 2, "layer_types": text["layer_types"][4:6]}
        (model / "config.json").write_text(json.dumps(config))
        options = {
            "max_model_len": 8192,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 16384,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": False,
        }
        return {"model": str(model), "options": CAPTURED | options | order}

    return Case(name, f"{ENGINES}:count_rows", arguments)


def cases() -> list[Case]:
    """Return all cases in the order in which they run."""
    groups = (
        orders,
        process_starts,
        families,
        drafts,
        features,
        published_shape,
        whole_sequences,
        small_gpus,
        loads,
    )
    return [case for group in groups for case in group()]
