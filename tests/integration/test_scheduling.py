"""A canvas of N steps takes N passes: the first with the prompt's end, the last emits it."""

from unittest import mock

import pytest

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.prompts import prompt_of
from vllm_diffusion.metrics import request_metrics
from vllm_diffusion.requests.bodies import body_number
from vllm_diffusion.runner import model_state

pytestmark = pytest.mark.engine

CANVAS = 32


@pytest.fixture(scope="module")
def engine(checkpoint, order):
    with (
        mock.patch.object(model_state.logger, "info_once") as logged,
        TracedEngine(
            checkpoint,
            async_scheduling=order == "asynchronous",
            max_num_batched_tokens=5 * CANVAS,
            max_model_len=512,
            prefix_cache_retention_interval=None,
        ) as engine,
    ):
        engine.logged = [call.args[0] % call.args[1:] for call in logged.call_args_list]
        yield engine


def test_log_of_a_start(engine, order):
    """A start logs once which classes serve the model, and the order of passes."""
    orders = {
        "asynchronous": "async, encode separate",
        "fused": "sync, encode fused with the next canvas",
    }
    (line,) = (line for line in engine.logged if "vllm-diffusion serves this model" in line)
    assert line.partition("this model: ")[2] == (
        "model DiffusionGemmaForBlockDiffusion, sampler DiffusionSampler, attention "
        "vllm_diffusion.attention.backend.CanvasAttentionBackend, scheduler canvas_scheduler "
        f"({orders[order]})"
    )


@pytest.mark.parametrize("num_canvases", [1, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_passes_to_the_unit(engine, order, num_canvases):
    """A request takes exactly its denoising steps and what the order adds to them."""
    prompt = prompt_of(CANVAS, seed=num_canvases)
    (output,) = engine.generate(
        [prompt], seeds=[1], max_tokens=num_canvases * CANVAS, ignore_eos=True
    )
    metrics = request_metrics(output)
    assert len(metrics.denoise_steps_per_canvas) == num_canvases
    is_async = order == "asynchronous"
    # Each canvas has a pass of its own there that encodes it, the last one too.
    num_encoded = num_canvases if is_async else num_canvases - 1
    num_extra = num_canvases if is_async else 0
    assert metrics.passes == num_extra + sum(metrics.denoise_steps_per_canvas)
    assert metrics.encode_rows == len(prompt) + CANVAS * num_encoded
    if not is_async:
        num_canvas_rows = CANVAS * sum(metrics.denoise_steps_per_canvas)
        assert metrics.canvas_rows == metrics.projected_rows == num_canvas_rows


READ = {"diffusion_read_only": True, "diffusion_max_steps": 1, "diffusion_canvas_length": 8}


def test_a_read_of_one_step_takes_one_pass(engine):
    """A read's step shares the pass of the prompt, or of a long prompt's last chunk."""
    for length, num_chunks in ((1, 1), (16, 1), (70, 1), (8 * CANVAS, 2)):
        with engine.counting() as rows:
            (output,) = engine.generate(
                [prompt_of(length, seed=50 + length)], seeds=[1], max_tokens=8, extra_args=READ
            )
        assert len(rows) == request_metrics(output).passes == num_chunks
        assert sum(rows) == length + 8


def test_reads_of_one_text_take_one_pass(engine):
    """Reads of one text compute it once, with their questions and canvases in the same pass."""
    text = prompt_of(64, seed=61)
    prompts = [text + prompt_of(3 + i, seed=62 + i) for i in range(4)]
    wanted = {"max_tokens": 8, "extra_args": READ, "logprobs": 3}
    seeds = [1, 2, 3, 4]
    with engine.counting() as rows:
        together = engine.generate(prompts, seeds=seeds, **wanted)
    assert len(rows) == 1
    # The block that a text ends in is nobody else's: 64 tokens, what follows them, and canvases.
    assert sum(rows) == 64 + 3 + 4 + 5 + 6 + 4 * 8
    for prompt, seed, read in zip(prompts, seeds, together, strict=True):
        assert engine.llm.reset_prefix_cache()
        (alone,) = engine.generate([prompt], seeds=[seed], **wanted)
        assert alone.token_ids == read.token_ids


def test_a_canvas_waits_for_a_pass_with_room(engine, oracle, order):
    """A canvas without room after the prompt waits alone, and the prompt does not."""
    prompt = prompt_of(5 * CANVAS - 3, seed=71)
    with engine.counting() as rows:
        (output,) = engine.generate([prompt], seeds=[8], max_tokens=CANVAS, ignore_eos=True)
    assert rows[:2] == [len(prompt), CANVAS]
    expected = oracle.generate(prompt, seed=8, max_tokens=CANVAS, ignore_eos=True)
    assert list(output.token_ids) == expected.tokens


def test_requests_without_a_seed_draw_their_own(engine):
    """Requests without a seed all draw different ones."""
    prompt = prompt_of(20, seed=81)
    params = engine.sampling_params(n=2, max_tokens=CANVAS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt}] * 2
    answers = [
        tuple(completion.token_ids)
        for output in engine.llm.generate(prompts, params, use_tqdm=False)
        for completion in output.outputs
    ]
    assert len(set(answers)) == 4


def test_a_batch_takes_the_passes_of_its_longest_request(engine):
    """Requests of different numbers of steps take together the passes of the longest one."""
    # The prompts and canvases of all three fit into the first pass.
    prompts = [prompt_of(8 + i, seed=i) for i in range(3)]
    sampling = [
        engine.sampling_params(
            seed=steps,
            max_tokens=2 * CANVAS,
            ignore_eos=True,
            extra_args={"diffusion_max_steps": steps},
        )
        for steps in (3, 5, 8)
    ]

    def num_passes(*requests):
        with engine.counting() as rows:
            engine.outputs([prompts[i] for i in requests], [sampling[i] for i in requests])
        return len(rows)

    alone = [num_passes(i) for i in range(3)]
    assert alone == sorted(set(alone))
    assert num_passes(0, 1, 2) == alone[-1]


def test_up_to_the_model_length(engine, oracle, order):
    """The last canvas is as wide as the model's length allows."""
    prompt = prompt_of(512 - 2 * CANVAS - 11, seed=2)
    (output,) = engine.generate([prompt], seeds=[6], max_tokens=400, ignore_eos=True)
    assert len(output.token_ids) == 2 * CANVAS + 11
    expected = oracle.generate(prompt, seed=6, max_tokens=2 * CANVAS, ignore_eos=True)
    assert list(output.token_ids[: 2 * CANVAS]) == expected.tokens


@pytest.mark.slow
def test_dummy_batches_change_nothing(engine, monkeypatch):
    """Dummy batches of an engine that shares experts change no token between any passes."""
    prompts = [prompt_of(8 + i, seed=i) for i in range(3)]

    def answers():
        outputs = engine.generate(
            prompts, seeds=[1, 2, 3], max_tokens=2 * CANVAS, ignore_eos=True, logprobs=1
        )
        return [(output.token_ids, output.logprobs) for output in outputs]

    expected = answers()
    schedule, num_dummies = engine.scheduler.schedule, []

    def after_a_dummy(*args, **kwargs):
        num_dummies.append(engine.runner.decode_query_len)
        engine.llm.llm_engine.engine_core.engine_core.execute_dummy_batch()
        return schedule(*args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "schedule", after_a_dummy)
    engine.llm.reset_prefix_cache()
    assert answers() == expected
    assert len(num_dummies) > 4
    assert set(num_dummies) == {CANVAS}


PRIORITIES = {"patient": 5, "more patient": 6, "urgent": 0}


def test_urgent_first() -> None:
    """Waiting requests run by priority, and by arrival if that is equal."""
    with TracedEngine(SHIPPED, scheduling_policy="priority", max_num_seqs=1) as engine:
        prompts = {name: prompt_of(40, seed=i) for i, name in enumerate(PRIORITIES)}
        params = engine.sampling_params(seed=1, max_tokens=40, ignore_eos=True)
        alone = {
            name: engine.generate([prompt], seeds=[1], max_tokens=40, ignore_eos=True)[0].token_ids
            for name, prompt in prompts.items()
        }
        for name, prompt in prompts.items():
            engine.llm.llm_engine.add_request(
                name, {"prompt_token_ids": prompt}, params, priority=PRIORITIES[name]
            )
        ended = {name: output.outputs[0].token_ids for name, output in engine.finish().items()}
        assert [*ended] == ["urgent", "patient", "more patient"]
        assert ended == alone


@pytest.mark.parametrize("is_async", [False, True])
def test_turns_of_a_body(is_async) -> None:
    """A request that comes alone ends before any of a body that fills the batch, and each has its
    tokens.
    """
    names = [*(f"of a body {i}" for i in range(5)), "alone"]
    with TracedEngine(SHIPPED, max_num_seqs=2, async_scheduling=is_async) as engine:
        params = {
            name: engine.sampling_params(
                seed=i, max_tokens=CANVAS if name == "alone" else 8 * CANVAS, ignore_eos=True
            )
            for i, name in enumerate(names)
        }
        prompts = {name: prompt_of(40, seed=i) for i, name in enumerate(names)}
        expected = {
            name: tokens_of(engine.outputs([prompts[name]], params[name])) for name in names
        }
        serving = engine.llm.llm_engine

        def add(name, body):
            token = body_number.set(body)
            serving.add_request(name, {"prompt_token_ids": prompts[name]}, params[name])
            body_number.reset(token)

        for name in names[:-1]:
            add(name, 7)
        for _ in range(6):
            serving.step()
        add("alone", 0)
        ended = {name: tokens_of([output]) for name, output in engine.finish().items()}
        assert next(iter(ended)) == "alone"
        assert ended == expected
        (preempted,) = engine.preempted
        assert preempted.startswith("of a body 1")
