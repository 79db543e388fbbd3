"""With LoRA adapters, DiffusionGemma's logits and tokens are those of PEFT's model."""

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.test_cuda_graphs import numbers
from tests.integration.test_images import PicturePrompt
from tests.integration.test_parity import assert_same_steps, denoising
from tests.integration.test_quantized import Distances, first_steps
from tests.robustness.serve_options import configure
from tests.support.doubles.graphs import emulated_capture
from tests.support.engines.engine import SYNCHRONOUS_OFTEN, TracedEngine, tokens_of
from tests.support.engines.generate import tokens_of_batch
from tests.support.models.adapters import (
    CONDITIONING,
    DECODER,
    ENCODER,
    EXPERTS,
    adapt,
    merge_shared,
    write_adapter,
)
from tests.support.models.checkpoints import random_checkpoint
from tests.support.models.prompts import prompt_of
from tests.support.models.quantized import QuantizedOracle, quantized_checkpoint
from tests.support.oracles.oracle import Oracle
from vllm_diffusion.startup.engine_process import refusal_in
from vllm_diffusion.weights.adapters import early_checks

pytestmark = pytest.mark.engine

CANVAS = 32
# An adapter of both parts, of one, of the module that only canvases meet, and of the stack that
# both share.
ADAPTERS: dict[str, dict[str, Any]] = {
    "everything": {
        "target_modules": f"{ENCODER}|{DECODER}|{CONDITIONING}",
        "target_parameters": EXPERTS,
        "rank_pattern": {"o_proj": 2},
        "use_rslora": True,
        "lora_alpha": 4,
    },
    "encoder": {"target_modules": ENCODER, "rank": 8},
    "decoder": {"target_modules": DECODER},
    "conditioning": {"target_modules": CONDITIONING, "rank": 2},
    # As NeMo trains and merges it.
    "shared": {},
}
# Fewer steps than a canvas is published with: the matrices of a step are what is compared.
STEPS = {"generation_config": {"max_denoising_steps": 6}}


class Served:
    """An engine with adapters, and PEFT's model of each."""

    def __init__(self, folder: Path, **options: Any) -> None:
        checkpoint = random_checkpoint(folder / "checkpoint", **STEPS)
        self.oracles: dict[str | None, Oracle] = {None: Oracle(checkpoint)}
        self.requests: dict[str | None, LoRARequest | None] = {None: None}
        for i, (name, config) in enumerate(ADAPTERS.items()):
            oracle = self.oracles[name] = Oracle(checkpoint)
            if name == "shared":
                merge_shared(oracle.model, folder / name, seed=i)
            else:
                adapt(oracle.model, folder / name, seed=i, **config)
            oracle.model.eval()
            self.requests[name] = LoRARequest(name, i + 1, str(folder / name))
            # Loaded again, by the name under which it is known already.
            self.requests[f"{name} again"] = LoRARequest(name, i + 101, str(folder / name))
        defaults = {"max_loras": 3, "max_lora_rank": 8, "max_logprobs": 5}
        self.engine = TracedEngine(checkpoint, enable_lora=True, **(defaults | options))

    def outputs(self, wanted: list[tuple[str | None, list[int], dict[str, Any]]]) -> list[Any]:
        """Return the answers to (adapter, prompt, sampling parameters), in one batch."""
        defaults = {"max_tokens": 2 * CANVAS, "ignore_eos": True}
        return self.engine.outputs(
            [prompt for _, prompt, _ in wanted],
            [self.engine.sampling_params(**(defaults | params)) for *_, params in wanted],
            lora_request=[self.requests[name] for name, *_ in wanted],
        )

    def tokens(self, *args: Any) -> list[list[int]]:
        return tokens_of(self.outputs(*args))


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Served]:
    """Run an engine with adapters."""
    served = Served(folder, **options)
    with served.engine:
        yield served


@pytest.fixture(scope="module", params=SYNCHRONOUS_OFTEN)
def served(request, tmp_path_factory):
    # A pass holds no prompt of the longest kind.
    options = {"async_scheduling": request.param, "max_num_batched_tokens": 4 * CANVAS}
    with serving(tmp_path_factory.mktemp("adapters"), **options) as running:
        yield running


# Two of a canvas's length, one after the other: the rows of the second's prompt are the first's
# canvas.
PROMPTS = {"a canvas": (CANVAS, 1), "again": (CANVAS, 2), "two chunks": (150, 3)}


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        pytest.param(
            name,
            prompt,
            marks=()
            if name in ("everything", "shared", None) or prompt == "two chunks"
            else pytest.mark.slow,
        )
        for name in (*ADAPTERS, None)
        for prompt in PROMPTS
    ],
)
def test_logits_and_tokens(served, name, prompt):
    """Each step of two canvases, the second on the encoded first, has PEFT's logits."""
    length, seed = PROMPTS[prompt]
    prompt = prompt_of(length, seed=seed)
    run = served.oracles[name].generate(prompt, seed=7, max_tokens=2 * CANVAS, ignore_eos=True)
    with served.engine.recording() as steps:
        (tokens,) = served.tokens([(name, prompt, {"seed": 7})])
    denoised = denoising(steps)
    if served.engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling:
        # One more is on its way before anybody knows that the last canvas is done.
        denoised = denoised[: len(run.logits)]
    assert_same_steps(denoised, run)
    assert tokens == run.tokens


def various(served: Served) -> list[tuple[str | None, list[int], dict[str, Any]]]:
    """Return requests of several adapters and of none, each with another option."""
    regex = StructuredOutputsParams(regex="[a-c]{3,5}")
    return [
        ("everything", prompt_of(17, seed=1), {"seed": 1, "logprobs": 2}),
        (None, prompt_of(60, seed=2), {"seed": 2}),
        ("decoder", prompt_of(90, seed=3), {"seed": 3, "top_p": 0.8, "max_tokens": 5}),
        (
            "everything",
            prompt_of(33, seed=4),
            {"seed": 4, "ignore_eos": False, "structured_outputs": regex},
        ),
        ("encoder", prompt_of(70, seed=5), {"seed": 5, "extra_args": {"diffusion_step_map": True}}),
        ("everything again", prompt_of(90, seed=3), {"seed": 3}),
        ("everything", prompt_of(90, seed=3), {"seed": 3}),
        (None, prompt_of(17, seed=1), {"seed": 1, "logprobs": 2}),
    ]


def test_alone_and_in_company(served):
    """Base and three adapters give the same tokens in one batch and one after another, and an
    adapter that is loaded again acts on requests of both its first and second load.
    """
    wanted = various(served)
    alone = [served.outputs([one])[0] for one in wanted]
    together = served.outputs(wanted)
    for one, other in zip(alone, together, strict=True):
        mine, theirs = one.outputs[0], other.outputs[0]
        assert mine.token_ids == theirs.token_ids
        # Attention sums in another order in a batch.
        assert numbers(mine.logprobs) == numbers(theirs.logprobs)
    assert alone[0].outputs[0].token_ids != alone[-1].outputs[0].token_ids
    assert alone[-3].outputs[0].token_ids == alone[-2].outputs[0].token_ids


def test_prefix_cache(served):
    """A prompt that one adapter encoded is not found in the cache by the others."""
    prompt = prompt_of(200, seed=21)
    names: tuple[str | None, ...] = (None, "everything", "encoder")
    params = {"seed": 6, "max_tokens": CANVAS}
    cold = [served.outputs([(name, prompt, params)])[0] for name in names]
    warm = [served.outputs([(name, prompt, params)])[0] for name in names]
    assert [output.num_cached_tokens for output in cold] == [0, 0, 0]
    assert all(output.num_cached_tokens >= 160 for output in warm)
    for one, other in zip(cold, warm, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_replayed_graphs(served):
    """Replayed self-conditioning reads the adapters of this pass's rows."""
    wanted = [one for one in various(served) if "structured_outputs" not in one[2]]
    expected = served.tokens(wanted)
    served.engine.state.graphs.capture(emulated_capture)
    try:
        assert served.tokens(wanted) == expected
    finally:
        served.engine.state.graphs.drop()


def test_bad_adapter(served, tmp_path):
    """A bad adapter is refused before it is queued, and does not disturb what was served."""
    prompt = prompt_of(20)
    before = served.tokens([("everything", prompt, {"seed": 1})])
    name = "model.decoder.layers.0.self_attn.q_proj"
    folder = write_adapter(
        tmp_path, {f"{name}.lora_A": torch.zeros(4, 64), f"{name}.lora_B": torch.zeros(128, 4)}
    )
    served.requests["bad"] = LoRARequest("bad", 9, str(folder))
    try:
        with pytest.raises(
            VLLMValidationError, match=r"q_proj\.lora_A is F32 \[4, 64\], but .* \[4, 128\]"
        ):
            served.tokens([("bad", prompt, {"seed": 1})])
        with pytest.raises(ValueError, match="LoRA adapter .* is F32"):
            served.engine.llm.llm_engine.add_lora(served.requests["bad"])
    finally:
        del served.requests["bad"]
    assert served.tokens([("everything", prompt, {"seed": 1})]) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_images(tmp_path):
    """The tower has no adapter, and a picture's rows are read with the encoder's part."""
    with serving(tmp_path, limit_mm_per_prompt={"image": 1, "video": 0, "audio": 0}) as served:
        asked, names = PicturePrompt(tmp_path / "checkpoint", seed=1), [*ADAPTERS, None]
        params = {"seed": 5, "max_tokens": CANVAS, "ignore_eos": True}
        runs = [
            served.oracles[name].generate(asked.tokens, **params, **asked.inputs) for name in names
        ]
        outputs = served.engine.llm.generate(
            [asked.request] * len(names),
            served.engine.sampling_params(**params),
            use_tqdm=False,
            lora_request=[served.requests[name] for name in names],
        )
    assert tokens_of(outputs) == [run.tokens for run in runs]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", ["fp8-dynamic", "nvfp4"])
def test_quantized(tmp_path, scheme):
    """First steps on quantized weights agree with PEFT's model as closely as without adapters."""
    checkpoint = quantized_checkpoint(tmp_path / "checkpoint", scheme)
    # To compressed-tensors encoder and decoder are one; PEFT has an adapter for each.
    oracles = [
        separate_parts(QuantizedOracle(checkpoint, t)) for t in (torch.float32, torch.float64)
    ]
    targets = rf"(?!.*\.experts\.)({ENCODER}|{DECODER}|{CONDITIONING})"
    plain = []
    prompts = [prompt_of(5 + 7 * i, seed=i) for i in range(6)]
    with TracedEngine(checkpoint, enable_lora=True, max_lora_rank=8) as engine:
        for name, oracle in zip(("adapter", "exact"), oracles, strict=True):
            if name == "exact":
                plain = [oracle.first_step(prompt, [7] * CANVAS) for prompt in prompts]
            adapt(oracle.model, tmp_path / name, seed=1, target_modules=targets)
        adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        steps = first_steps(engine, prompts, lora_request=adapter)
    for prompt, without in zip(prompts, plain, strict=True):
        # Another canvas, but the same order of size: the adapter is not nothing.
        assert (oracles[1].first_step(prompt, [7] * CANVAS) - without).abs().mean() > 0.1
    found = Distances(*oracles, zip(prompts, steps, strict=True))
    assert sorted(found.errors)[len(prompts) // 2] <= 1e-3
    assert found.ours <= 2 * found.theirs + len(prompts) * 1e-2


def separate_parts(oracle: QuantizedOracle) -> QuantizedOracle:
    for layer in oracle.model.model.encoder.language_model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear) and "experts" not in name:
                stem, _, end = name.rpartition(".")
                setattr(layer.get_submodule(stem), end, copy.deepcopy(module))
    return oracle


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sleep_and_new_weights(tmp_path):
    """Adapters are unchanged after a sleep, and act on new weights."""
    prompt, names = prompt_of(60, seed=1), ["everything", "decoder", None]
    params = {"seed": 7, "max_tokens": 2 * CANVAS, "ignore_eos": True}
    with serving(tmp_path, enable_sleep_mode=True) as served:
        llm = served.engine.llm

        def check() -> list[list[int]]:
            found = served.tokens([(name, prompt, {"seed": 7}) for name in names])
            assert found == [
                served.oracles[name].generate(prompt, **params).tokens for name in names
            ]
            return found

        before = check()
        llm.sleep(level=1)
        llm.wake_up()
        assert check() == before
        changed = random_checkpoint(tmp_path / "changed", seed=1, **STEPS)
        served.oracles = {name: Oracle(changed) for name in names}
        for i, name in enumerate(ADAPTERS):
            if name in names:
                model = served.oracles[name].model
                adapt(model, tmp_path / "again", seed=i, **ADAPTERS[name])
                model.eval()
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(changed)})
        llm.wake_up(tags=["kv_cache"])
        assert all(old != new for old, new in zip(before, check(), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "fully_sharded_loras": True},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=lambda layout: " ".join(layout),
)
@pytest.mark.parametrize("served", [False], indirect=True, ids=["synchronous"])
def test_two_ranks(served, layout):
    """Two ranks with parts of the layers and adapters give PEFT's tokens."""
    # On a CPU experts are refused where their matrices are cut in another way than themselves.
    experts = "decoder" if "fully_sharded_loras" in layout else "everything"
    names = [experts, None, "encoder", "conditioning"]
    prompts = [prompt_of(30 + 20 * i, seed=i) for i in range(len(names))]
    params = {"seed": 7, "max_tokens": 2 * CANVAS, "ignore_eos": True}
    requests: list[dict[str, Any]] = []
    for name, prompt in zip(names, prompts, strict=True):
        request = served.requests[name]
        requests.append({"prompt": prompt, "params": params})
        if request is not None:
            requests[-1]["adapter"] = (request.lora_name, request.lora_int_id, request.lora_path)
    checkpoint = served.engine.llm.llm_engine.model_config.model
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    answers = tokens_of_batch(checkpoint, requests, **lora, **layout)
    for name, prompt, tokens in zip(names, prompts, answers, strict=True):
        assert tokens == served.oracles[name].generate(prompt, **params).tokens, name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            "--lora-modules poet={folder}/nowhere",
            "--lora-modules poet={folder}/nowhere: LoRA adapter {folder}/nowhere: there is no such "
            "folder; give the folder that PEFT's save_pretrained wrote.",
        ),
        (
            "--max-lora-rank 8 --lora-modules poet={folder}/wide",
            "--lora-modules poet={folder}/wide: LoRA adapter {folder}/wide: its rank 16 is above "
            "--max-lora-rank 8; start the server with a larger one.",
        ),
    ],
    ids=["nowhere", "too wide"],
)
def test_start(tmp_path, options, sentence):
    """An adapter of the command line that does not fit is reported before loading."""
    # vLLM's command has imported its parser when it loads plugins; this process had not.
    importlib.import_module("vllm.entrypoints.common.cli_args")
    early_checks.note_command_line()
    name = "model.decoder.layers.0.self_attn.q_proj"
    pair = {f"{name}.lora_A": torch.zeros(16, 128), f"{name}.lora_B": torch.zeros(128, 16)}
    write_adapter(tmp_path / "wide", pair, {"r": 16})
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        configure("--enable-lora " + options.format(folder=tmp_path))
    assert refusal_in(raised.value) == sentence.format(folder=tmp_path)
    configure(f"--enable-lora --max-lora-rank 16 --lora-modules poet={tmp_path}/wide")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--max-lora-rank 8", ""),
        ("--fully-sharded-loras --tensor-parallel-size 2", "--fully-sharded-loras on the CPU"),
        ("--data-parallel-size 2", "experts that several engines share"),
        ("--data-parallel-size 2 --enable-expert-parallel", "experts that several engines share"),
    ],
)
def test_experts(options, reason):
    """Adapters of experts are accepted unless options of the start exclude them, with a reason."""
    rules = configure(f"--enable-lora {options}").model_config.diffusion.adapters
    assert reason in rules.no_experts
    assert bool(reason) == bool(rules.no_experts)
    assert "model.encoder.language_model.layers.3.experts.base_layer" in rules.modules
