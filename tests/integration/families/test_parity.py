"""The engine's tokens of every masked family are those of its published loop."""

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.engines.generate import tokens_of_batch
from tests.support.families.cases import CASES, Wanted, assert_loops, expected
from tests.support.families.model import TinyModel, prompt_of
from tests.support.families.run import Run
from tests.support.oracles.frames import EVERY_FIELD, Watched, steps_of_trace, steps_that_decided
from vllm_diffusion.decoding.layouts import GrowingSequence
from vllm_diffusion.metrics import request_metrics

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}


@functools.cache
def model_of(name: str) -> TinyModel:
    return CASES[name].make()


@functools.cache
def loop_of(name: str, prompt: tuple[int, ...], wanted: Wanted, ends: tuple[int, ...]) -> Run:
    """Return the loop's run, computed once for engines of both orders."""
    return expected(CASES[name], model_of(name), prompt, wanted, ends)


class Family:
    """A family's tiny model, and the engine that serves it."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.name, self.case = name, CASES[name]
        self.model = model_of(name)
        self.block_length = self.model.block_length
        self.is_asynchronous = bool(options.get("async_scheduling"))
        options = OPTIONS | self.case.options | options
        self.engine = TracedEngine(self.model.save(folder), **options)
        self.is_aligned = self.engine.state.spec.layout.alignment > 1
        self.grows = isinstance(self.engine.state.spec.layout, GrowingSequence)
        # Whether a pass of its own makes a finished block's keys and values.
        self.commits = (
            self.engine.state.spec.layout.draws_first_token
            or self.engine.state.spec.ways[0].rule.can_finish_kv
        )

    def generate(self, prompts: list[list[int]], wanted: list[Wanted], **changes: Any) -> list[Any]:
        """Return the token ids of each prompt's answer, all in one batch."""
        outputs = self.engine.outputs(prompts, [one.sampling_params(**changes) for one in wanted])
        return tokens_of(outputs)

    def loop_until(self, prompt: list[int], wanted: Wanted) -> Run:
        """Return the loop's passes up to the block of the last requested token."""
        run = self.expected(prompt, wanted)
        end = len(prompt) + wanted.max_tokens
        return replace(run, passes=[one for one in run.passes if one.start < end])

    def expected(self, prompt: list[int], wanted: Wanted, ends: tuple[int, ...] = ()) -> Run:
        """Return the loop's run, with its tokens cut to those that a request gets."""
        return loop_of(self.name, tuple(prompt), wanted, ends)

    def check(self, prompts: list[list[int]], wanted: list[Wanted]) -> None:
        """Check that the answers, in one batch, are the loop's."""
        answers = self.generate(prompts, wanted)
        for prompt, one, answer in zip(prompts, wanted, answers, strict=True):
            loop = self.expected(prompt, one)
            assert answer == loop.tokens, (len(prompt), one)


def in_both_orders(names: Iterable[str], often: Collection[tuple[str, str]]) -> list[Any]:
    """Return parameters (family, order), of which ``often`` run without ``-m slow``."""
    return [
        pytest.param(
            (name, order),
            id=f"{name}-{order}",
            marks=() if (name, order) in often else pytest.mark.slow,
        )
        for order in ("synchronous", "asynchronous")
        for name in names
    ]


# A family that draws first tokens, one that holds whole sequences, and an aligned one in
# asynchronous order.
OFTEN = [("nemotron", "synchronous"), ("llada", "synchronous"), ("sdar", "asynchronous")]
# One family for each way in which canvases lie and are decided.
EVERY_WAY = [*OFTEN, ("llada2.1", "synchronous"), ("fast-dllm", "synchronous")]


@pytest.fixture(scope="module", params=in_both_orders(CASES, OFTEN))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    name, order = request.param
    folder = tmp_path_factory.mktemp("family")
    served = Family(name, folder, async_scheduling=order == "asynchronous")
    yield served
    served.engine.close()


@pytest.mark.parametrize("family", in_both_orders(CASES, EVERY_WAY), indirect=True)
def test_prompts_of_every_length(family: Family) -> None:
    """Prompts within a block, at its border and beyond it give the loop's tokens in a batch."""
    B = family.block_length
    lengths = sorted({1, 2, B - 1, B, B + 1, 2 * B, 63, 150})
    prompts = [prompt_of(length, seed=length) for length in lengths]
    family.check(prompts, [Wanted(max_tokens=2 * B + 3)] * len(prompts))


@pytest.mark.parametrize("threshold", [0.0, 0.1, pytest.param(0.95, marks=pytest.mark.slow)])
def test_thresholds(family: Family, threshold: float) -> None:
    """Thresholds that reveal all masks at once, a few, or one per step give the loop's tokens."""
    prompts = [prompt_of(length, seed=length) for length in (5, 33, 70)]
    wanted = Wanted(max_tokens=family.block_length + 5, threshold=threshold)
    family.check(prompts, [wanted] * len(prompts))


def test_strategies_and_steps(family: Family) -> None:
    """Each strategy of the loop gives its tokens, also with fewer steps than positions."""
    strategies: list[tuple[str, int | None]] = [(s, None) for s in family.case.strategies]
    strategies += [(s, n) for s in family.case.stepped for n in (2, 3)]
    # Answers end within blocks, which then have fewer masks.
    prompts = [prompt_of(length, seed=length) for length in range(40, 40 + len(strategies))]
    B = family.block_length
    wanted = [Wanted(2 * B - 3, threshold=0.9, strategy=s, steps=n) for s, n in strategies]
    family.check(prompts, wanted)


def test_entropy_budgets(family: Family) -> None:
    """Budgets for one mask, a few, or a whole block give the loop's tokens at any temperature."""
    if "entropy_budget" not in family.case.strategies:
        pytest.skip("the published loop has no budget")
    budgets = [(0.0, 0.0), (1.0, 0.0), (3.0, 0.7), (5.0, 1.3), (10_000.0, 0.0)]
    wanted = [
        Wanted(2 * family.block_length, strategy="entropy_budget", entropy_budget=b, temperature=t)
        for b, t in budgets
    ]
    family.check([prompt_of(33 + i, seed=i) for i in range(len(wanted))], wanted)


def test_frames_and_step_maps(family: Family) -> None:
    """Frames end as the answer, change no token, and give the step map again."""
    B, spec = family.block_length, family.engine.state.spec
    prompts = [prompt_of(length, seed=length) for length in (5, 33, 2 * B)]
    wanted = [
        Wanted(2 * B + 3, threshold=0.1),
        Wanted(B, threshold=0.95),
        Wanted(2 * B, temperature=1.0, seed=3),
    ]
    unseen = family.generate(prompts, wanted)
    seen = Watched(
        family.engine.llm,
        prompts,
        [one.sampling_params(shown=EVERY_FIELD) for one in wanted],
    )
    for i, (tokens, output) in enumerate(zip(unseen, seen.outputs, strict=True)):
        completion = output.outputs[0]
        assert list(completion.token_ids) == tokens
        canvases = seen.canvases(i)
        last = [token for frames in canvases for token in frames[-1].token_ids or ()]
        assert last[: len(tokens)] == tokens
        assert [t for frames in canvases for t in frames[-1].answer_token_ids] == tokens
        assert [frames[-1].ends_answer for frames in canvases] == [
            *[False] * (len(canvases) - 1),
            True,
        ]
        assert all(frames[-1].is_last and all(frames[-1].kept or ()) for frames in canvases)
        first_token_length = B if spec.layout.draws_first_token else None
        replayed = steps_that_decided(
            canvases, has_mask=True, first_token_length=first_token_length
        )
        assert list(completion.diffusion_step_map) == replayed[: len(tokens)]
        given = len(prompts[i]) % B if spec.layout.alignment > 1 else 0
        trace = completion.diffusion_trace
        if spec.layout.recomputes:
            # Each of its canvases begins with everything before it.
            starts = range(len(prompts[i]), 10**6, B)
            trace = [
                [row[start:] for row in rows] for start, rows in zip(starts, trace, strict=False)
            ]
        traced = steps_of_trace(trace, given)
        assert traced[: len(tokens)] == replayed[: len(tokens)]
        committed = [token for rows in trace for token in rows[-1]]
        assert committed[given:][: len(tokens)] == tokens
        assert [n for part in seen.step_maps[i, 0] for n in part.steps] == replayed[: len(tokens)]
        metrics = request_metrics(completion)
        assert metrics is not None
        # A pass that commits is not a step; the scheduler cannot tell it from one where the last
        # step may have done its work.
        for counted, frames in zip(metrics.denoise_steps_per_canvas, canvases, strict=True):
            assert counted - len(frames) in ((0, 1) if spec.ways[0].rule.can_finish_kv else (0,))


def test_temperature_and_filters(family: Family) -> None:
    """With this package's noise the loop gives the same draws, with temperatures and filters."""
    wanted = [Wanted(temperature=0.7, seed=5), Wanted(temperature=1.3, seed=6)]
    if "top_k" in family.case.filters:
        wanted.append(Wanted(temperature=1.0, top_k=5, seed=7))
        wanted.append(Wanted(temperature=0.8, top_k=20, top_p=0.9, seed=9, threshold=0.6))
    if "top_p" in family.case.filters:
        wanted.append(Wanted(temperature=1.0, top_p=0.8, seed=8))
    prompts = [prompt_of(9 + 7 * i, seed=i) for i in range(len(wanted))]
    family.check(prompts, wanted)


@pytest.mark.parametrize(
    "family", in_both_orders(("llada2.1", "llada2.2"), EVERY_WAY), indirect=True
)
@pytest.mark.parametrize(
    "max_post_steps",
    [*(pytest.param(steps, marks=pytest.mark.slow) for steps in (0, 16)), 2],
)
def test_editing(family: Family, max_post_steps: int) -> None:
    """Editing rewrites the same revealed tokens as the loop, also with a threshold of 0."""
    wanted = [
        Wanted(70, threshold=0.2, editing_threshold=editing, max_post_steps=max_post_steps)
        for editing in (0.0, 0.5)
    ]
    prompts = [prompt_of(45, seed=3), prompt_of(20, seed=4)]
    family.check(prompts, wanted)
    loop = family.expected(prompts[0], wanted[0])
    assert loop.rewritten > 0


def test_an_end_token_ends_the_answer(family: Family) -> None:
    """An end token at the start or within an answer cuts it as in the loop."""
    prompts = [prompt_of(length, seed=length) for length in (6, 40)]
    wanted = Wanted(max_tokens=2 * family.block_length)
    whole = family.generate(prompts, [wanted] * len(prompts))
    for prompt, answer in zip(prompts, whole, strict=True):
        for end in {answer[0], answer[len(answer) // 2]}:
            expected_run = family.expected(prompt, wanted, (end,))
            (found,) = family.generate([prompt], [wanted], stop_token_ids=[end])
            assert found == expected_run.tokens
            assert found[-1] == end


def test_prefix_cache(family: Family) -> None:
    """A cached prompt or earlier turn gives the same tokens as without a cache."""
    prompt = prompt_of(100, seed=41)
    wanted = Wanted(max_tokens=2 * family.block_length)
    (answer,) = family.generate([prompt], [wanted])
    prompts = [prompt, prompt[:70] + prompt_of(9, seed=42), prompt + answer + prompt_of(3, seed=43)]
    outputs = family.engine.outputs(prompts, wanted.sampling_params())
    for one, output in zip(prompts, outputs, strict=True):
        layout = family.engine.state.spec.layout
        shares = not layout.crosses_cache_blocks or len(one) % 32 == len(prompt) % 32
        if layout.recomputes or not shares:
            assert output.num_cached_tokens == 0
        else:
            assert output.num_cached_tokens >= 64
            assert output.num_cached_tokens % family.block_length == 0 or not family.is_aligned
        tokens = list(output.outputs[0].token_ids)
        assert tokens == family.expected(one, wanted).tokens


def test_passes(family: Family) -> None:
    """A request alone takes the loop's passes, and none for a commit that another pass makes."""
    B = family.block_length
    for length in (3, B, 2 * B + 1, 70):
        prompt, wanted = prompt_of(length, seed=900 + length), Wanted(max_tokens=3 * B - 1)
        with family.engine.counting() as passes:
            family.generate([prompt], [wanted])
        # The loops go on to the end of a block, and some beyond; ours stops with the last token.
        loop = family.loop_until(prompt, wanted)
        # The end of a prompt shares its pass with the first step, unless that one waits for its
        # token.
        draws_first_token = family.engine.state.spec.layout.draws_first_token
        denoise = loop.count("denoise") + draws_first_token * loop.count("prefill")
        if family.is_asynchronous or family.commits:
            # In the asynchronous order one more is on its way when the last token is known, or
            # where the rows of a pass grow with what is emitted, when a block is.
            late = len({one.start for one in loop.passes}) if family.grows else 1
            assert len(passes) <= denoise + loop.count("commit") + late * family.is_asynchronous
        else:
            assert len(passes) == denoise


def test_constraints(family: Family) -> None:
    """An answer satisfies its grammar and has no bad words."""
    from vllm.sampling_params import StructuredOutputsParams

    wanted = Wanted(max_tokens=40)
    pattern = r"[a-f]{3,9} [0-9]{2}"
    params = [
        wanted.sampling_params(
            detokenize=True,
            ignore_eos=False,
            structured_outputs=StructuredOutputsParams(regex=pattern),
        ),
        wanted.sampling_params(detokenize=True, bad_words=["a"]),
    ]
    prompts = [{"prompt_token_ids": prompt_of(length, seed=length)} for length in (37, 21)]
    held, other = family.engine.llm.generate(prompts, params, use_tqdm=False)
    tokenizer = family.engine.llm.get_tokenizer()
    said = tokenizer.decode(held.outputs[0].token_ids, skip_special_tokens=True)
    assert re.fullmatch(pattern, said)
    (banned,) = tokenizer.encode("a", add_special_tokens=False)
    assert banned not in other.outputs[0].token_ids


@pytest.fixture(
    scope="module",
    params=in_both_orders(
        ("sdar", "nemotron", "llada2.1", "llada2.2", "fast-dllm"),
        [("sdar", "asynchronous")],
    ),
)
def tight(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    """Return options with small chunks, and a cache for one long request or two others."""
    name, order = request.param
    # Blocks of the cache are the model's where these are larger and counted from the start.
    block_size = 16 if name in ("sdar", "nemotron") else 32
    served = Family(
        name,
        tmp_path_factory.mktemp("tight"),
        async_scheduling=order == "asynchronous",
        max_model_len=192,
        max_num_batched_tokens=80,
        num_gpu_blocks_override=192 // block_size + 2,
    )
    yield served
    served.engine.close()


def test_chunks_and_preemption(tight: Family) -> None:
    """Twelve requests in eight slots give the loop's tokens although they are preempted."""
    lengths = [90, 33, 5, 61, 64, 17, 100, 2, 45, 32, 80, 71]
    prompts = [prompt_of(length, seed=7 * length) for length in lengths]
    wanted = [
        Wanted(max_tokens=40, threshold=0.2, temperature=(i % 2) * 0.8, seed=i)
        for i in range(len(lengths))
    ]
    tight.engine.preempted.clear()
    tight.check(prompts, wanted)
    assert tight.engine.preempted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdar", "nemotron", "llada2.1", "llada2.2", "fast-dllm", "llada"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    """Two processes with half of the heads and vocabulary each give the published loop's tokens."""
    case = CASES[name]
    model = case.make()
    lengths = (3, 41, 64, 77)
    wanted = [
        Wanted(max_tokens=40, temperature=t, seed=i) for i, t in enumerate((0.0, 0.7, 1.0, 0.0))
    ]
    prompts = [prompt_of(length, seed=length) for length in lengths]
    requests = [
        {"prompt": prompt, "params": one.plain()}
        for prompt, one in zip(prompts, wanted, strict=True)
    ]
    options = OPTIONS | case.options | {"tensor_parallel_size": 2}
    answers = tokens_of_batch(model.save(tmp_path), requests, **options)
    assert_loops(case, model, prompts, wanted, answers)
