"""With keep_last_canvas, the next turn of a chat reads the whole reply from the prefix cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from tests.support.engine import TracedEngine
from tests.support.oracle import Oracle
from tests.support.prompts import prompt_of
from vllm_diffusion.metrics import request_metrics

pytestmark = pytest.mark.engine

CANVAS = 32
BLOCK = 16


@pytest.fixture(scope="module")
def engine(checkpoint, order):
    with TracedEngine(
        checkpoint,
        async_scheduling=order == "asynchronous",
        additional_config={
            "diffusion": {"keep_last_canvas": True}
            | ({"fused_encode": False} if order == "separate" else {})
        },
        # Room for about one request of the longest length in the cache.
        kv_cache_memory_bytes=1024**2,
        max_num_batched_tokens=5 * CANVAS,
        max_model_len=512,
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _empty(engine):
    """Nothing of another test is in the cache, and nothing is left behind."""
    assert engine.llm.reset_prefix_cache()
    yield
    finish(engine)
    scheduler = engine.scheduler
    assert not scheduler.requests
    pool = scheduler.kv_cache_manager.block_pool
    # One is the pool's own, for what has no block.
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def finish(engine: TracedEngine) -> None:
    """Run what is left to be done behind the answers."""
    while engine.scheduler.has_requests():
        engine.llm.llm_engine.step()


def ask(engine: TracedEngine, prompt: list[int], seed: int, max_tokens: int, **params):
    (output,) = engine.outputs(
        [prompt],
        engine.sampling_params(seed=seed, max_tokens=max_tokens, ignore_eos=True, **params),
    )
    return output


def check_two_turns(
    engine: TracedEngine, oracle: Oracle, prompt_len: int, cut: int, seed: int, by_stop: bool
) -> list[tuple[list[int], list[int]]]:
    """A reply cut inside a canvas, what follows on it, and what would follow on the uncut one.

    Returns:
        The prompt and the tokens of both.
    """
    prompt = prompt_of(prompt_len, seed)
    uncut = list(ask(engine, prompt, seed, 2 * CANVAS).outputs[0].token_ids)
    assert engine.llm.reset_prefix_cache()
    reply = uncut[: uncut.index(uncut[cut]) + 1] if by_stop else uncut[: cut + 1]
    limits = {"stop_token_ids": [reply[-1]]} if by_stop else {}
    first = ask(engine, prompt, seed, 2 * CANVAS if by_stop else len(reply), **limits)
    assert list(first.outputs[0].token_ids) == reply

    num_kept = (prompt_len + len(reply)) // BLOCK * BLOCK
    turns = []
    for history in (prompt + reply, prompt + uncut):
        follow_up = history + prompt_of(10, seed + 1)
        with engine.recording() as steps:
            output = ask(engine, follow_up, seed + 2, CANVAS)
        # The same to the end of the reply, and what was cut off is not there.
        assert output.num_cached_tokens == num_kept
        is_async = engine.scheduler.vllm_config.scheduler_config.async_scheduling
        in_place = CANVAS if is_async else 0
        num_encoded = request_metrics(output.outputs[0]).encode_rows - in_place
        assert num_encoded == len(follow_up) - num_kept
        torch.testing.assert_close(
            steps[0].logits,
            oracle.first_step(follow_up, steps[0].canvas.tolist()),
            atol=1e-3,
            rtol=0,
        )
        turns.append((follow_up, list(output.outputs[0].token_ids)))
    return turns


@pytest.mark.parametrize(
    ("prompt_len", "cut", "by_stop"),
    [
        (40, CANVAS + 20, True),
        pytest.param(17, 9, True, marks=pytest.mark.slow),
        pytest.param(16, CANVAS + 30, False, marks=pytest.mark.slow),
        (70, CANVAS - 1, False),
    ],
)
def test_next_turn_reads_the_reply(engine, oracle, prompt_len, cut, by_stop):
    """Only what is new is computed, and the tokens are those of a fresh computation."""
    for follow_up, tokens in check_two_turns(engine, oracle, prompt_len, cut, 3, by_stop):
        expected = oracle.generate(follow_up, seed=5, max_tokens=CANVAS, ignore_eos=True)
        assert tokens == expected.tokens


@pytest.mark.slow
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    prompt_len=st.integers(5, 120),
    cut=st.integers(0, 2 * CANVAS - 1),
    seed=st.integers(0, 1000),
    by_stop=st.booleans(),
)
def test_next_turn_reads_any_reply(engine, oracle, prompt_len, cut, seed, by_stop):
    """The same for any lengths, to the first step: later ones may tip at a near-tie."""
    assert engine.llm.reset_prefix_cache()
    # A limit below the canvas would make it narrower.
    cut = cut if by_stop else max(cut, CANVAS - 1)
    check_two_turns(engine, oracle, prompt_len, cut, seed, by_stop)


def test_the_answer_waits_for_no_pass(engine, order):
    """It comes with the step that converges, as without the option; the encode runs behind it."""
    output = ask(engine, prompt_of(20, 1), 5, CANVAS).outputs[0]
    assert output.finish_reason == "length"
    metrics = request_metrics(output)
    in_place = order == "asynchronous"
    assert (
        metrics.passes == (order == "separate") + sum(metrics.denoise_steps_per_canvas) + in_place
    )
    left = [
        request.num_tokens - request.num_computed_tokens for request in engine.scheduler.running
    ]
    assert left == ([] if in_place else [CANVAS])
    finish(engine)
    # Nor is what the client was handed changed later.
    assert request_metrics(output) == metrics


def test_the_next_turn_may_come_at_once(engine, oracle):
    """The encode and the next prompt share a pass; the prompt reads what that pass writes."""
    prompt = prompt_of(24, 2)
    reply = list(ask(engine, prompt, 1, CANVAS).outputs[0].token_ids)
    follow_up = [*prompt, *reply, *prompt_of(7, 3)]
    output = ask(engine, follow_up, 2, CANVAS)
    assert output.num_cached_tokens == (24 + CANVAS) // BLOCK * BLOCK
    expected = oracle.generate(follow_up, seed=2, max_tokens=CANVAS, ignore_eos=True)
    assert list(output.outputs[0].token_ids) == expected.tokens


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"max_tokens": 3}, id="no-whole-block"),
        pytest.param(
            {"max_tokens": CANVAS, "extra_args": {"diffusion_read_only": True}}, id="read-only"
        ),
        pytest.param({"max_tokens": 512}, id="model-length"),
    ],
)
def test_nothing_to_keep(engine, limits):
    """Where no next turn could read more, no pass is spent."""
    ask(engine, prompt_of(16 if "extra_args" in limits else BLOCK * 30, 4), 1, **limits)
    assert not engine.scheduler.running


def test_aborts(engine, oracle):
    """An aborted request is not encoded; one that is answered may be aborted too."""
    llm_engine = engine.llm.llm_engine
    params = engine.sampling_params(seed=1, max_tokens=8 * CANVAS, ignore_eos=True)
    llm_engine.add_request("aborted", {"prompt_token_ids": prompt_of(20, 5)}, params)
    for _ in range(4):
        llm_engine.step()
    llm_engine.abort_request(list(llm_engine.output_processor.request_states), internal=True)
    assert not engine.scheduler.running

    ask(engine, prompt_of(20, 6), 1, CANVAS)
    answered = [request.request_id for request in engine.scheduler.running]
    engine.scheduler.finish_requests(answered, RequestStatus.FINISHED_ABORTED)
    prompt = prompt_of(20, 7)
    output = ask(engine, prompt, 2, CANVAS).outputs[0]
    expected = oracle.generate(prompt, seed=2, max_tokens=CANVAS, ignore_eos=True)
    assert list(output.token_ids) == expected.tokens


def test_dropped_when_memory_is_short(engine, order, monkeypatch):
    """An answered request that is preempted is not computed again."""
    prompt = prompt_of(20, 8)
    reply = list(ask(engine, prompt, 1, CANVAS).outputs[0].token_ids)
    if order == "asynchronous":
        assert not engine.scheduler.running
        return
    (answered,) = engine.scheduler.running
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    monkeypatch.setattr(
        manager,
        "allocate_slots",
        lambda request, *args, **kwargs: (
            None if request is answered else allocate(request, *args, **kwargs)
        ),
    )
    finish(engine)
    assert answered.num_preemptions == 1
    output = ask(engine, [*prompt, *reply, *prompt_of(5, 1)], 2, CANVAS)
    assert output.num_cached_tokens == 20 // BLOCK * BLOCK


def test_tokens_in_a_small_cache(engine, oracle):
    """Four chats of two turns in a cache that holds about one of them."""
    prompts = [prompt_of(20 + 5 * i, 9) for i in range(4)]
    engine.preempted.clear()
    limits = {"ignore_eos": True, "extra_args": {"diffusion_max_steps": 4}}
    for turn in range(2):
        seeds = [10 * turn + i for i in range(4)]
        outputs = engine.generate(prompts, seeds=seeds, max_tokens=5 * CANVAS, **limits)
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            expected = oracle.generate(
                prompt,
                seed=seeds[i],
                max_tokens=5 * CANVAS,
                ignore_eos=True,
                max_denoising_steps=4,
            )
            assert list(output.token_ids) == expected.tokens
            prompts[i] = [*prompt, *expected.tokens, *prompt_of(6, turn)]
    assert engine.preempted
