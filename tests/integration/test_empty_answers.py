"""Answers whose first token ends them are counted, and do not occur with ``never_empty``."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines.engine import TracedEngine
from tests.support.models.prompts import chat_prompt
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = pytest.mark.engine

PROMPT = list(range(30, 60))
NUM_TOKENS = 6


def serving(
    order: str, settings: dict[str, Any], family: str = "diffusion_gemma", **options: Any
) -> TracedEngine:
    return TracedEngine(
        shipped_checkpoint(family),
        additional_config={"diffusion": settings},
        async_scheduling=order == "asynchronous",
        max_model_len=128,
        **options,
    )


@pytest.fixture(
    scope="module",
    params=[
        ("diffusion_gemma", {"never_empty": True}),
        ("sdar", {"never_empty": True}),
        ("diffusion_gemma", {}),
    ],
    ids=["canvases", "blocks", "canvases, without the setting"],
)
def served(request: pytest.FixtureRequest, order: str) -> Iterator[tuple[TracedEngine, bool]]:
    """Yield an engine, and whether its answers may not be empty."""
    family, settings = request.param
    # The masked checkpoint's tokenizer has these marks too.
    with serving(order, settings, family, reasoning_parser="gemma4") as engine:
        yield engine, "never_empty" in settings


def ends_of(engine: TracedEngine) -> list[int]:
    """Return the tokens that end an answer."""
    config = engine.llm.llm_engine.vllm_config.model_config.try_get_generation_config()
    eos = config["eos_token_id"]
    return list(eos) if isinstance(eos, list) else [eos]


def answer(
    engine: TracedEngine, *, seed: int = 3, prompt: list[int] = PROMPT, **params: Any
) -> list[int]:
    (output,) = engine.generate([prompt], seeds=[seed], max_tokens=NUM_TOKENS, **params)
    return list(output.token_ids)


def eager(engine: TracedEngine, **more: Any) -> dict[str, Any]:
    """Return parameters of a request whose model wants to end its answer at every position."""
    return {"logit_bias": dict.fromkeys(ends_of(engine), 100.0), **more}


# The first test of each engine, since an engine warns once.
def test_empty_answers_are_counted_and_reported(
    served: tuple[TracedEngine, bool], start_log: pytest.LogCaptureFixture
) -> None:
    """Empty answers are counted, and a warning names the setting if there are many."""
    engine, never_empty = served
    totals = engine.scheduler._counters._totals[0]
    before = totals.empty_answers
    for seed in range(12):
        answer(engine, seed=seed, **eager(engine))
    # One that goes on, and one that is cut.
    answer(engine, ignore_eos=True)
    assert totals.empty_answers - before == (0 if never_empty else 12)
    warned = [r for r in start_log.records if "never_empty" in r.getMessage()]
    assert len(warned) == (not never_empty)


def test_first_token(served: tuple[TracedEngine, bool]) -> None:
    """With the setting an answer has a token before an immediate end, and without it none."""
    engine, never_empty = served
    tokens = answer(engine, **eager(engine))
    assert [token in ends_of(engine) for token in tokens] == [False] * never_empty + [True]


def test_first_token_after_a_thought(served: tuple[TracedEngine, bool]) -> None:
    """With the setting no end token directly follows a thought, however it ended."""
    engine, never_empty = served
    marks = engine.scheduler.vllm_config.reasoning_config
    (mark,) = marks.natural_reasoning_end_token_ids
    thinking = [*PROMPT, *marks.reasoning_start_token_ids]
    (budgeted,) = engine.generate(
        [thinking], seeds=[3], max_tokens=NUM_TOKENS, **eager(engine, thinking_token_budget=0)
    )
    ended = [token in ends_of(engine) for token in budgeted.token_ids]
    assert budgeted.token_ids[0] == mark
    assert ended == [False, *[False] * never_empty, True]
    # Nothing but this mark is nearly as likely as the end, so that it stands at every position that
    # no end may have.
    bias = {**eager(engine)["logit_bias"], mark: 80.0}
    tokens = answer(engine, logit_bias=bias)
    assert (tokens == [mark] * NUM_TOKENS) == never_empty


def test_what_a_request_prescribes(served: tuple[TracedEngine, bool]) -> None:
    """Reads, grammars and allowed tokens that are all ends are served as without the setting."""
    from vllm.sampling_params import StructuredOutputsParams

    engine, _ = served
    ends = ends_of(engine)
    regex = StructuredOutputsParams(regex="a?")
    assert answer(engine, **eager(engine, structured_outputs=regex))[0] in ends
    assert answer(engine, allowed_token_ids=ends)[0] in ends
    read = {"diffusion_read_only": True, "diffusion_max_steps": 1}
    assert answer(engine, **eager(engine, extra_args=read))[0] in ends


def test_verified_drafts(order: str) -> None:
    """A verified draft begins with no end token either; after a thought it may, since drafts have
    no banned words.
    """
    settings = {"never_empty": True, "rule": "linear_spec"}
    with serving(order, settings) as engine:
        tokens = answer(engine, **eager(engine))
        assert [token in ends_of(engine) for token in tokens] == [False, True]


@pytest.mark.parametrize("default", ["entropy_bound", "linear_spec"])
def test_ways_of_requests(order: str, default: str) -> None:
    """Where requests choose their way, each is protected as its own way allows: a draft has the
    tokens that it has without the setting, and no thought of a denoised answer precedes its end,
    whichever way is the default.
    """
    answers = {}
    for never_empty in (False, True):
        settings = {"never_empty": never_empty, "rules": "all", "rule": default}
        with serving(order, settings, reasoning_parser="gemma4") as engine:
            (mark,) = engine.scheduler.vllm_config.reasoning_config.natural_reasoning_end_token_ids
            bias = {**eager(engine)["logit_bias"], mark: 80.0}
            question = chat_prompt(engine.llm.get_tokenizer(), "Reverse the word lamp.")
            for way in ("entropy_bound", "linear_spec", "autoregressive"):
                chosen = {"extra_args": {"diffusion_rule": way}}
                tokens = answer(engine, prompt=question, temperature=0, **chosen)
                assert len(set(tokens)) > 2
                answers.setdefault(way, []).append(tokens)
            denoised = answer(
                engine, logit_bias=bias, extra_args={"diffusion_rule": "entropy_bound"}
            )
            assert (denoised == [mark] * NUM_TOKENS) == never_empty
    assert all(with_it == without for without, with_it in answers.values())
