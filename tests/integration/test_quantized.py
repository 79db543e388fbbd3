"""Quantized checkpoints compute in the engine what compressed-tensors defines.

A quantized activation is discontinuous: where a rounding error of 1e-7 moves an entry over the
middle between two numbers of FP4, a logit of these weights may move by 4. So layers are compared on
the inputs that they had in the engine. Logits must be the reference's on most prompts, and on
average no further from it than the reference's own rounding errors lead.
"""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from tests.support.engines.engine import StepRecord, TracedEngine
from tests.support.engines.generate import run_engine, small_engine
from tests.support.engines.layer_records import recorded_experts, recorded_linears, reference_linear
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.prompts import prompt_of
from tests.support.models.quantized import (
    QuantizedOracle,
    example,
    modelopt_checkpoint,
    quantized_checkpoint,
)

pytestmark = pytest.mark.engine

CANVAS = 32
NUM_LAYERS = 4
NUM_PROMPTS = 6
SCHEMES = [
    "fp8-dynamic",
    pytest.param("nvfp4", marks=pytest.mark.slow),
    pytest.param("fp8-static", marks=pytest.mark.slow),
    pytest.param("nvfp4-weights", marks=pytest.mark.slow),
]


def share_of_rows_off(actual: Tensor, fp32: Tensor, fp64: Tensor) -> float:
    """Return the share of rows at least twice as far from float64 as PyTorch in float32."""
    rounding = torch.finfo(torch.float32).eps * fp64.abs().max()
    budget = 2 * ((fp32.double() - fp64).abs().amax(-1).median() + 4 * rounding)
    return ((actual.double() - fp64).abs().amax(-1) > budget).double().mean().item()


def divergence(exact: Tensor, logits: Tensor) -> float:
    """Return the mean KL divergence of the distributions, in nats."""
    log_p, log_q = exact.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


def first_steps(engine: TracedEngine, prompts: list[list[int]], **more: Any) -> list[StepRecord]:
    """Return the first step of an answer to each prompt."""
    params = engine.sampling_params(seed=1, max_tokens=CANVAS, ignore_eos=True)
    found = []
    for prompt in prompts:
        with engine.recording() as steps:
            engine.outputs([prompt], params, **more)
        found.append(steps[0])
    return found


class Distances:
    """How far the engine's first steps, and the float32 reference's, are from float64.

    Attributes:
        errors: Of each prompt, the median row's largest error of a logit.
        plain_errors: Likewise, of the reference.
        ours: The sum of KL divergences, in nats.
        theirs: Likewise, of the reference.
    """

    def __init__(self, fp32: QuantizedOracle, fp64: QuantizedOracle, steps: Any) -> None:
        self.errors, self.plain_errors, self.ours, self.theirs = [], [], 0.0, 0.0
        for prompt, step in steps:
            canvas = step.canvas.tolist()
            exact = fp64.first_step(prompt, canvas).double()
            plain = perturbed_first_step(fp32, prompt, canvas)
            self.errors.append((step.logits - exact).abs().amax(-1).median().item())
            self.plain_errors.append((plain.double() - exact).abs().amax(-1).median().item())
            self.ours += divergence(exact, step.logits)
            self.theirs += divergence(exact, plain)


class Run:
    """The first steps of a quantized checkpoint on several prompts, with every layer recorded."""

    def __init__(self, folder: Any, scheme: str) -> None:
        checkpoint = quantized_checkpoint(folder / scheme, scheme)
        self.prompts = [prompt_of(5 + 7 * i) for i in range(NUM_PROMPTS)]
        with TracedEngine(checkpoint) as engine:
            model = engine.runner.model
            with (
                recorded_linears(model) as self.linears,
                recorded_experts(NUM_LAYERS) as self.experts,
            ):
                self.steps = first_steps(engine, self.prompts)
        self.fp32 = QuantizedOracle(checkpoint, torch.float32)
        self.fp64 = QuantizedOracle(checkpoint, torch.float64)


@pytest.fixture(scope="module", params=SCHEMES)
def run(request, tmp_path_factory):
    return Run(tmp_path_factory.mktemp("quantized"), request.param)


def test_every_layer(run):
    """Attention, dense MLPs and experts are within the error budget on prompts and canvases."""
    layers32, layers64 = (oracle.model.model.decoder.layers for oracle in (run.fp32, run.fp64))
    assert len(run.linears) == 4 * NUM_LAYERS
    off = {}
    for name, passes in run.linears.items():
        x = torch.cat([x for x, _ in passes])
        actual = torch.cat([output for _, output in passes])
        off[name] = share_of_rows_off(
            actual, reference_linear(layers32, name, x), reference_linear(layers64, name, x)
        )
    assert len(run.experts) == NUM_LAYERS
    for layer, passes in run.experts.items():
        x, weights, ids, actual = (torch.cat(tensors) for tensors in zip(*passes, strict=True))
        ids = ids.long()
        off[f"experts of layer {layer}"] = share_of_rows_off(
            actual,
            layers32[layer].experts(x, ids, weights),
            layers64[layer].experts(x.double(), ids, weights.double()),
        )
    print("\nshare of rows beyond the budget:", {k: round(v, 4) for k, v in off.items() if v})
    assert max(off.values()) <= 0.01


def test_logits(run):
    """First steps agree with quantize-dequantize in float64, with no more flips than PyTorch.

    Which activations flip depends on the processor's order of sums.
    """
    found = Distances(run.fp32, run.fp64, zip(run.prompts, run.steps, strict=True))
    print("\nmedian row's error:", ", ".join(f"{error:.1e}" for error in found.errors))
    print(f"KL, nats, of all prompts: ours {found.ours:.1e}, plain PyTorch {found.theirs:.1e}")
    num_flipped, num_plain = (
        sum(error > 1e-3 for error in each) for each in (found.errors, found.plain_errors)
    )
    print(f"prompts with a flip: ours {num_flipped}, plain PyTorch {num_plain}")
    assert num_flipped <= max(NUM_PROMPTS // 2 - 1, num_plain)
    assert found.ours <= 2 * found.theirs + NUM_PROMPTS * 1e-2


def perturbed_first_step(oracle: QuantizedOracle, prompt: list[int], canvas: list[int]) -> Tensor:
    """Return the float32 reference's step after a rounding error in each embedding."""
    table = oracle.model.model.decoder.embed_tokens.weight
    kept = table.detach().clone()
    generator = torch.Generator().manual_seed(len(prompt))
    noise = torch.rand(table.shape, generator=generator) - 0.5
    try:
        table.data.mul_(1 + 2 * torch.finfo(torch.float32).eps * noise)
        return oracle.first_step(prompt, canvas)
    finally:
        table.data.copy_(kept)


def sum_of_7_and_8(engine: TracedEngine) -> str:
    """Return what the trained weights answer."""
    (output,) = engine.llm.chat(
        [{"role": "user", "content": "Add 7 and 8."}],
        engine.sampling_params(max_tokens=CANVAS, skip_special_tokens=True),
        use_tqdm=False,
    )
    return output.outputs[0].text


def test_modelopt_layout(tmp_path, start_log):
    """Experts in NVFP4, other layers in BF16 and an FP8 cache with scales give right answers, and
    the log names once what computes them.
    """
    compressed = quantized_checkpoint(tmp_path / "nvfp4", "nvfp4")
    with TracedEngine(modelopt_checkpoint(compressed, tmp_path / "modelopt")) as engine:
        assert engine.llm.llm_engine.vllm_config.cache_config.cache_dtype.startswith("fp8")
        layers = engine.runner.model.model.layers
        scales = [layer.self_attn.attn._k_scale.item() for layer in layers]
        assert scales == pytest.approx([0.05, 1, 1, 1], rel=1e-2)
        assert layers[0].self_attn.attn._v_scale.item() == pytest.approx(0.02, rel=1e-2)
        with recorded_experts(NUM_LAYERS) as experts:
            engine.generate([prompt_of(40)], seeds=[1], max_tokens=CANVAS, ignore_eos=True)
        assert sum_of_7_and_8(engine) == "15"
    for line in (
        "NVFP4 experts: emulated in PyTorch on the CPU (weights and activations)",
        "4 x experts: TorchNvfp4Experts",
    ):
        assert sum(line in message for message in start_log.messages) == 1
    oracles = [QuantizedOracle(compressed, dtype) for dtype in (torch.bfloat16, torch.float64)]
    for layer, passes in experts.items():
        x, weights, ids, actual = (torch.cat(tensors) for tensors in zip(*passes, strict=True))
        low, exact = (
            oracle.model.model.decoder.layers[layer].experts(
                x.to(dtype), ids.long(), weights.to(dtype)
            )
            for oracle, dtype in zip(oracles, (torch.bfloat16, torch.float64), strict=True)
        )
        error, theirs = ((out.double() - exact).abs() for out in (actual, low))
        assert error.mean() <= 2 * theirs.mean()


@pytest.mark.slow
def test_modelopt_weights_alone(tmp_path):
    """Experts whose inputs are not quantized need no input scales."""
    compressed = quantized_checkpoint(tmp_path / "nvfp4", "nvfp4-weights")
    checkpoint = modelopt_checkpoint(compressed, tmp_path / "modelopt")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "W4A16_NVFP4"
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert not any("input_scale" in name for name in load_file(checkpoint / "model.safetensors"))
    with TracedEngine(checkpoint) as engine:
        assert sum_of_7_and_8(engine) == "15"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-dynamic"])
def test_two_ranks(scheme, tmp_path):
    """Two ranks with shards of weights and scales give right answers, the same in any batch.

    They differ in bits from one process: each rank sums its own part of a row, and scales it where
    FP8 is dynamic.
    """
    checkpoint = quantized_checkpoint(tmp_path / scheme, scheme)
    tasks, tokenizer = example("checkpoints/tiny_tasks"), AutoTokenizer.from_pretrained(SHIPPED)
    examples = [
        one for family in ("sums", "reverse") for one in tasks.evaluation_set(family, 6, seed=3)
    ]
    requests = [
        {
            "prompt": tokenizer.apply_chat_template(
                one.messages, add_generation_prompt=True, return_dict=False
            ),
            "params": {"max_tokens": 4 * CANVAS, "seed": 1},
        }
        for one in examples
    ]
    params = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    requests += [
        {"prompt": tokenizer(text).input_ids, "params": params | {"seed": seed}}
        for text in ("One, two", "A list:", "Tree", "red green blue")
        for seed in (3, 9)
    ]
    answer = run_engine(
        {
            "engine": small_engine(checkpoint, tensor_parallel_size=2),
            "batches": [requests, *([request] for request in requests)],
        }
    )
    together, *alone = ([one["tokens"] for one in batch] for batch in answer["batches"])
    assert sum(alone, []) == together
    texts = [
        tokenizer.decode(tokens, skip_special_tokens=True) for tokens in together[: len(examples)]
    ]
    right = [tasks.is_correct(one, text) for one, text in zip(examples, texts, strict=True)]
    assert sum(right) >= len(right) - 2, texts
