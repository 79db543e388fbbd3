"""The engine gives the logits and tokens of Hugging Face's ``generate`` in float32.

Whole generations are compared, and where more than one thing is going on (several prefill chunks,
prefix-cache hits, batches) every step by itself, given what was before it.
"""

import pytest
import torch
from torch import Tensor

from tests.support.engines.engine import StepRecord, TracedEngine
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.prompts import chat_prompt, prompt_of
from tests.support.oracles.oracle import Oracle, OracleRun

pytestmark = pytest.mark.engine

CANVAS = 32
# The window of the shipped checkpoint is 24: contexts below it, and several times longer.
PROMPT_LENGTHS = (17, 301, *(pytest.param(length, marks=pytest.mark.slow) for length in (40, 150)))
# What summation in another order may move a float32 logit of size 10 by, over a generation.
LOGIT_TOLERANCE = 1e-3


def denoising(steps: list[StepRecord], request: str | None = None) -> list[StepRecord]:
    return [s for s in steps if not s.encoding and (request is None or s.request_id == request)]


def assert_same_steps(steps: list[StepRecord], run: OracleRun) -> None:
    for i, (ours, canvas) in enumerate(zip(steps, run.canvases, strict=True)):
        assert torch.equal(ours.canvas, canvas), f"step {i} started from another canvas"
    assert_same_logits(steps, run.logits)


def assert_same_logits(steps: list[StepRecord], expected: list[Tensor]) -> None:
    for i, (ours, logits) in enumerate(zip(steps, expected, strict=True)):
        error = (ours.logits - logits).abs().max().item()
        assert error <= LOGIT_TOLERANCE, f"step {i}: logits differ by {error:.2e}"


@pytest.fixture(
    scope="module", params=["reference", pytest.param("triton", marks=pytest.mark.slow)]
)
def engine(checkpoint, request):
    """Return an engine with one of the attention kernels; an interpreted pass takes seconds."""
    with TracedEngine(
        checkpoint, additional_config={"diffusion": {"attention": request.param}}
    ) as engine:
        yield engine


@pytest.fixture
def small_token_budget(engine):
    """Allow two canvases of rows per pass, so that long prompts are prefilled in chunks."""
    budget = engine.scheduler.max_num_scheduled_tokens
    engine.scheduler.max_num_scheduled_tokens = 2 * CANVAS
    yield
    engine.scheduler.max_num_scheduled_tokens = budget


def assert_each_step_agrees(steps: list[StepRecord], prompt: list[int], oracle: Oracle) -> None:
    """Check each step's logits against the oracle's, given the canvases and logits before it."""
    canvases, logits = [s.canvas for s in steps], [s.logits for s in steps]
    assert_same_logits(steps, oracle.follow(prompt, canvases, logits))


@pytest.mark.parametrize("length", PROMPT_LENGTHS, ids=lambda n: f"context-{n}")
def test_logits_of_every_step(engine, oracle, length):
    """All steps of three canvases, two of them on encoded ones, have the oracle's logits."""
    prompt = prompt_of(length)
    expected = oracle.generate(prompt, seed=7, max_tokens=3 * CANVAS, ignore_eos=True)
    with engine.recording() as steps:
        (ours,) = engine.generate([prompt], seeds=[7], max_tokens=3 * CANVAS, ignore_eos=True)
    assert_same_steps(denoising(steps), expected)
    assert list(ours.token_ids) == expected.tokens


@pytest.mark.parametrize("length", [101, 301], ids=lambda n: f"context-{n}")
@pytest.mark.usefixtures("small_token_budget")
def test_several_prefill_chunks(engine, oracle, length):
    """Two canvases after a prompt in pieces of at most 64 rows have the oracle's logits."""
    prompt = prompt_of(length, seed=3)
    with engine.recording() as steps:
        engine.generate([prompt], seeds=[7], max_tokens=2 * CANVAS, ignore_eos=True)
    assert_each_step_agrees(denoising(steps), prompt, oracle)


def test_prefix_cache_hit(engine, oracle):
    """A repeated prompt comes mostly from the cache and changes no result."""
    prompt = prompt_of(200, seed=5)
    engine.generate([prompt], seeds=[11], max_tokens=CANVAS, ignore_eos=True)
    with engine.recording() as steps:
        output = engine.outputs(
            [prompt], engine.sampling_params(seed=3, max_tokens=2 * CANVAS, ignore_eos=True)
        )[0]
    assert output.num_cached_tokens >= 160
    assert_each_step_agrees(denoising(steps), prompt, oracle)


@pytest.mark.usefixtures("small_token_budget")
def test_batch_of_prefill_denoise_and_encode(engine, oracle):
    """Requests at all stages in one pass read what each reads alone."""
    prompts = [prompt_of(n, seed=9) for n in (5, 60, 130, 250)]
    seeds = list(range(20, 24))
    with engine.recording() as steps:
        engine.generate(prompts, seeds=seeds, max_tokens=2 * CANVAS, ignore_eos=True)
    of_prompt = {}
    for request in dict.fromkeys(s.request_id for s in steps):
        own = denoising(steps, request)
        of_prompt[tuple(own[0].canvas.tolist())] = own
    for prompt, seed in zip(prompts, seeds, strict=True):
        first = oracle.generate(
            prompt, seed=seed, max_tokens=CANVAS, ignore_eos=True, max_denoising_steps=1
        )
        own = of_prompt[tuple(first.canvases[0].tolist())]
        assert_each_step_agrees(own, prompt, oracle)


@pytest.mark.parametrize("engine", ["reference"], indirect=True)
@pytest.mark.parametrize(
    "numbers",
    [range(0, 20, 5), pytest.param(range(20), marks=pytest.mark.slow)],
    ids=lambda numbers: f"{len(numbers)} prompts",
)
def test_tokens_of_many_prompts(engine, oracle, numbers):
    """Whole generations of several canvases, end tokens included, equal the oracle's tokens."""
    prompts = [prompt_of(17 + 13 * i, seed=2) for i in numbers]
    seeds = [100 + i for i in numbers]
    outputs = engine.generate(prompts, seeds=seeds, max_tokens=3 * CANVAS)
    for prompt, seed, output in zip(prompts, seeds, outputs, strict=True):
        expected = oracle.generate(prompt, seed=seed, max_tokens=3 * CANVAS)
        assert list(output.token_ids) == expected.tokens


def test_trained_checkpoint(tmp_path):
    """The shipped weights, whose canvases converge early, give the oracle's tokens and steps."""
    from transformers import AutoTokenizer

    from vllm_diffusion.metrics import request_metrics

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    questions = [
        "What is 7+8?",
        "What is 12+19?",
        "Reverse the word: stone",
        "Count from 1 to 30.",
        "Write in upper case: hello there",
    ] * 2
    oracle = Oracle(SHIPPED)
    with TracedEngine(SHIPPED) as engine:
        prompts = [chat_prompt(tokenizer, question) for question in questions]
        seeds = list(range(len(prompts)))
        outputs = engine.generate(prompts, seeds=seeds, max_tokens=4 * CANVAS)
        for prompt, seed, output in zip(prompts, seeds, outputs, strict=True):
            expected = oracle.generate(prompt, seed=seed, max_tokens=4 * CANVAS)
            assert list(output.token_ids) == expected.tokens
            steps = request_metrics(output).denoise_steps_per_canvas
            assert list(steps) == expected.steps_per_canvas
