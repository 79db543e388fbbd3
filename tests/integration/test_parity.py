"""The engine gives the logits and the tokens of Hugging Face's ``generate``, in float32.

Whole generations are compared, and where more than one thing is going on (several prefill chunks,
prefix-cache hits, batches) every step by itself, given what was before it.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.checkpoints import SHIPPED
from tests.support.engine import StepRecord, TracedEngine
from tests.support.oracle import Oracle, OracleRun
from tests.support.prompts import prompt_of

pytestmark = pytest.mark.engine

CANVAS = 32
# The window of the shipped checkpoint is 24: contexts below it, and several times longer.
PROMPT_LENGTHS = (17, 40, 150, 301)
# What summation in another order may move a float32 logit of size 10 by, over a generation.
LOGIT_TOLERANCE = 1e-3


def denoising(steps: list[StepRecord], request: str | None = None) -> list[StepRecord]:
    return [s for s in steps if not s.encoding and (request is None or s.request_id == request)]


def assert_same_steps(steps: list[StepRecord], run: OracleRun) -> None:
    assert len(steps) == len(run.logits)
    for i, (ours, logits, canvas) in enumerate(zip(steps, run.logits, run.canvases, strict=True)):
        assert torch.equal(ours.canvas, canvas), f"step {i} started from another canvas"
        error = (ours.logits - logits).abs().max().item()
        assert error <= LOGIT_TOLERANCE, f"step {i}: logits differ by {error:.2e}"


SETTINGS = {
    "reference": {"attention": "reference"},
    "triton": {"attention": "triton"},
    "skipping": {"skip_unlikely": True},
}


@pytest.fixture(
    scope="module",
    params=[
        "reference",
        pytest.param("triton", marks=pytest.mark.slow),
        pytest.param("skipping", marks=pytest.mark.slow),
    ],
)
def engine(checkpoint, request):
    """With either implementation of the attention kernel, and without what is unlikely.

    Triton's interpreter takes seconds a pass: of its tests, CI runs the sample below.
    """
    engine = TracedEngine(checkpoint, additional_config={"diffusion": SETTINGS[request.param]})
    assert engine.runner.sampler.head.kernels.skip_unlikely == (request.param == "skipping")
    yield engine
    engine.close()


@pytest.fixture
def small_token_budget(engine):
    """Two canvases of rows in a pass: longer prompts are prefilled in several chunks."""
    budget = engine.scheduler.max_num_scheduled_tokens
    engine.scheduler.max_num_scheduled_tokens = 2 * CANVAS
    yield
    engine.scheduler.max_num_scheduled_tokens = budget


def assert_each_step_agrees(steps: list[StepRecord], prompt: list[int], oracle: Oracle) -> None:
    """Each step's logits are the oracle's, given the canvases and logits before it."""
    logits = [s.logits for s in steps]
    expected = oracle.follow(prompt, [s.canvas for s in steps], logits)
    assert len(expected) == len(steps)
    for i, (ours, theirs) in enumerate(zip(logits, expected, strict=True)):
        error = (ours - theirs).abs().max().item()
        assert error <= LOGIT_TOLERANCE, f"step {i}: logits differ by {error:.2e}"


@pytest.mark.parametrize("length", PROMPT_LENGTHS, ids=lambda n: f"context-{n}")
def test_logits_of_every_step(engine, oracle, length):
    """Three canvases: the first on the prompt, the others on top of encoded canvases."""
    prompt = prompt_of(length)
    expected = oracle.generate(prompt, seed=7, max_tokens=3 * CANVAS, ignore_eos=True)
    with engine.recording() as steps:
        (ours,) = engine.generate([prompt], seeds=[7], max_tokens=3 * CANVAS, ignore_eos=True)
    assert_same_steps(denoising(steps), expected)
    assert list(ours.token_ids) == expected.tokens


def test_logits_do_depend_on_the_context(oracle):
    """The comparison can fail: another context moves the logits by far more than the tolerance."""
    one = oracle.generate(prompt_of(40), seed=7, max_tokens=CANVAS, ignore_eos=True)
    other = oracle.generate(prompt_of(40, seed=1), seed=7, max_tokens=CANVAS, ignore_eos=True)
    assert (one.logits[0] - other.logits[0]).abs().max() > 100 * LOGIT_TOLERANCE


@pytest.mark.parametrize("length", [101, 301], ids=lambda n: f"context-{n}")
@pytest.mark.usefixtures("small_token_budget")
def test_several_prefill_chunks(engine, oracle, length):
    """A prompt that comes in pieces of at most 64 rows, and two canvases on top of it."""
    prompt = prompt_of(length, seed=3)
    with engine.recording() as steps:
        engine.generate([prompt], seeds=[7], max_tokens=2 * CANVAS, ignore_eos=True)
    assert_each_step_agrees(denoising(steps), prompt, oracle)


def test_prefix_cache_hit(engine, oracle):
    """The second time, most of the prompt comes from the cache, and nothing else changes."""
    prompt = prompt_of(200, seed=5)
    engine.generate([prompt], seeds=[11], max_tokens=CANVAS, ignore_eos=True)
    with engine.recording() as steps:
        output = engine.llm.generate(
            [{"prompt_token_ids": prompt}],
            engine.sampling_params(seed=3, max_tokens=2 * CANVAS, ignore_eos=True),
            use_tqdm=False,
        )[0]
    assert output.num_cached_tokens >= 160
    assert_each_step_agrees(denoising(steps), prompt, oracle)


@pytest.mark.usefixtures("small_token_budget")
def test_batch_of_prefill_denoise_and_encode(engine, oracle):
    """Requests at all stages in one pass: each reads as it does alone."""
    prompts = [prompt_of(n, seed=9) for n in (5, 60, 130, 250, 33, 90)]
    seeds = list(range(20, 26))
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


@pytest.mark.parametrize(
    "numbers",
    [range(0, 20, 3), pytest.param(range(20), marks=pytest.mark.slow)],
    ids=lambda numbers: f"{len(numbers)} prompts",
)
def test_tokens_of_many_prompts(engine, oracle, numbers):
    """Whole generations of several canvases, end tokens included, token by token."""
    prompts = [prompt_of(17 + 13 * i, seed=2) for i in numbers]
    seeds = [100 + i for i in numbers]
    outputs = engine.generate(prompts, seeds=seeds, max_tokens=3 * CANVAS)
    for prompt, seed, output in zip(prompts, seeds, outputs, strict=True):
        expected = oracle.generate(prompt, seed=seed, max_tokens=3 * CANVAS)
        assert list(output.token_ids) == expected.tokens


@pytest.mark.parametrize("engine", ["triton"], indirect=True)
@pytest.mark.usefixtures("small_token_budget")
def test_with_the_triton_kernel(engine, oracle):
    """Two prompts of several canvases in one batch, one of them prefilled in two chunks."""
    prompts = [prompt_of(25, seed=2), prompt_of(90, seed=2)]
    few_steps = {"diffusion_max_steps": 4}
    outputs = engine.generate(
        prompts, seeds=[100, 101], max_tokens=2 * CANVAS, ignore_eos=True, extra_args=few_steps
    )
    for prompt, seed, output in zip(prompts, (100, 101), outputs, strict=True):
        expected = oracle.generate(
            prompt, seed=seed, max_tokens=2 * CANVAS, ignore_eos=True, max_denoising_steps=4
        )
        assert list(output.token_ids) == expected.tokens


def test_same_seed_same_tokens_in_any_company(engine):
    """Alone, among seven others, and in a slot that others had before."""
    prompt = prompt_of(77, seed=4)
    (alone,) = engine.generate([prompt], seeds=[42], max_tokens=2 * CANVAS, ignore_eos=True)
    others = [prompt_of(20 + 20 * i, seed=6) for i in range(7)]
    crowd = engine.generate(
        [*others[:3], prompt, *others[3:]],
        seeds=[1, 2, 3, 42, 4, 5, 6, 7],
        max_tokens=2 * CANVAS,
        ignore_eos=True,
    )
    (again,) = engine.generate([prompt], seeds=[42], max_tokens=2 * CANVAS, ignore_eos=True)
    assert list(crowd[3].token_ids) == list(alone.token_ids) == list(again.token_ids)


def test_denoising_leaves_the_prompt_cache_unchanged(engine):
    """Blocks of earlier tokens keep their bits while a canvas is denoised on top of them."""
    from vllm import TokensPrompt

    prompt = prompt_of(96, seed=8)
    llm_engine = engine.llm.llm_engine
    llm_engine.add_request(
        "1000000",
        TokensPrompt(prompt_token_ids=prompt),
        engine.sampling_params(seed=1, max_tokens=CANVAS, ignore_eos=True),
    )
    llm_engine.step()
    request_id = next(r for r in engine.scheduler.requests if r.startswith("1000000"))
    num_full_blocks = len(prompt) // 16

    def prompt_blocks() -> list[tuple[int, ...]]:
        groups = engine.scheduler.kv_cache_manager.get_block_ids(request_id)
        return [tuple(group[:num_full_blocks]) for group in groups]

    held = prompt_blocks()
    before = [cache.clone() for cache in engine.runner.kv_caches]
    for _ in range(8):
        llm_engine.step()
    assert request_id in engine.scheduler.requests, "it ended before the comparison"
    # Sliding-window groups give blocks back that have left the window; those are others' by now.
    kept = [
        block
        for then, now in zip(held, prompt_blocks(), strict=True)
        for block, still in zip(then, now, strict=True)
        if block == still != 0
    ]
    assert len(kept) >= num_full_blocks
    for cache, saved in zip(engine.runner.kv_caches, before, strict=True):
        assert torch.equal(cache[kept], saved[kept])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()


def test_counters_of_a_request(engine):
    """Passes are denoising steps, with the prompt in the first; the last canvas is never encoded."""
    from vllm_diffusion.metrics import request_metrics

    # No cached prefix: a prompt that no other test sends.
    prompt = prompt_of(100, seed=77)
    (output,) = engine.generate([prompt], seeds=[1], max_tokens=2 * CANVAS, ignore_eos=True)
    metrics = request_metrics(output)
    steps = metrics.denoise_steps_per_canvas
    assert len(steps) == 2
    assert metrics.passes == sum(steps)
    assert metrics.encode_rows == len(prompt) + CANVAS
    assert metrics.canvas_rows == CANVAS * sum(steps)
    assert metrics.projected_rows == CANVAS * sum(steps)


@pytest.mark.skipif(not SHIPPED.exists(), reason="the shipped checkpoint is missing")
def test_trained_checkpoint(tmp_path):
    """The shipped weights, whose canvases converge early: same tokens, same number of steps."""
    from transformers import AutoTokenizer

    from vllm_diffusion.metrics import request_metrics

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    questions = [
        "What is 7+8?",
        "What is 12+19?",
        "Reverse the word: stone",
        "Count from 1 to 30.",
        "Write in upper case: hello there",
    ] * 4
    oracle = Oracle(SHIPPED)
    engine = TracedEngine(SHIPPED)
    try:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for question in questions
        ]
        seeds = list(range(len(prompts)))
        outputs = engine.generate(prompts, seeds=seeds, max_tokens=4 * CANVAS)
        for prompt, seed, output in zip(prompts, seeds, outputs, strict=True):
            expected = oracle.generate(prompt, seed=seed, max_tokens=4 * CANVAS)
            assert list(output.token_ids) == expected.tokens
            steps = request_metrics(output).denoise_steps_per_canvas
            assert list(steps) == expected.steps_per_canvas
    finally:
        engine.close()
