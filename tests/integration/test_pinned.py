"""With ``diffusion_pinned`` the shipped DiffusionGemma's answer has the pinned tokens."""

import math
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.engine import TracedEngine
from tests.support.models.prompts import chat_prompt
from tests.support.oracles.frames import EVERY_FIELD, Watched

pytestmark = pytest.mark.engine

CANVAS = 32


@pytest.fixture(scope="module")
def prompt(engine: TracedEngine) -> list[int]:
    """Return a chat's prompt."""
    return chat_prompt(engine.llm.get_tokenizer(), "What is 7+8?")


def ids(engine: TracedEngine, text: str) -> list[int]:
    """Return the token ids of a text, one for each character."""
    return list(engine.llm.get_tokenizer().encode(text, add_special_tokens=False))


def pins(tokens: dict[int, int], fill: int = 100, width: int = CANVAS) -> dict[str, Any]:
    """Return arguments that pin tokens at positions of a first canvas."""
    canvas = [tokens.get(position, fill) for position in range(width)]
    return {"diffusion_seed_canvas": canvas, "diffusion_pinned": sorted(tokens)}


def test_frames_and_step_maps(engine: TracedEngine, prompt: list[int]) -> None:
    """Every frame has the pinned tokens as kept positions that no step decided."""
    tokens = {2: 40, 3: 41, 9: 42}
    params = engine.sampling_params(
        max_tokens=CANVAS, seed=1, ignore_eos=True, extra_args=EVERY_FIELD | pins(tokens)
    )
    watched = Watched(engine.llm, [prompt], [params])
    (frames,) = watched.canvases(0)
    for frame in frames:
        assert {position: frame.token_ids[position] for position in tokens} == tokens
        assert all(frame.kept[position] for position in tokens)
    (output,) = watched.outputs
    steps = output.outputs[0].diffusion_step_map
    assert [position for position, step in enumerate(steps) if step == 0] == sorted(tokens)
    for row in output.outputs[0].diffusion_trace[0]:
        assert {position: row[position] for position in tokens} == tokens


@pytest.mark.parametrize("extra", [{}, {"diffusion_step_map": True}], ids=["plain", "step map"])
@pytest.mark.parametrize("num_logprobs", [0, 3, -1])
def test_log_probabilities_name_the_pinned_token(
    extra: dict[str, Any], num_logprobs: int, engine: TracedEngine, prompt: list[int]
) -> None:
    """Pinned tokens have the model's own log-probabilities in the canvas's last step."""
    tokens = {0: 100, 5: 101, 6: 102}
    both = [
        engine.sampling_params(
            max_tokens=CANVAS,
            seed=1,
            ignore_eos=True,
            logprobs=num,
            extra_args=extra | pins(tokens),
        )
        for num in (num_logprobs, -1)
    ]
    (output, whole) = (one.outputs[0] for one in engine.outputs([prompt] * 2, both))
    assert output.token_ids == whole.token_ids
    for position, token in enumerate(output.token_ids):
        own, every = output.logprobs[position], whole.logprobs[position]
        assert own[token].logprob == every[token].logprob
        above = sum(one.logprob >= every[token].logprob for one in every.values())
        assert own[token].rank == above
        assert sum(math.exp(one.logprob) for one in every.values()) == pytest.approx(1, abs=1e-3)
    # The model predicts something else there.
    assert all(output.logprobs[position][token].rank > 1 for position, token in tokens.items())


def test_a_pinned_end_token_ends_the_answer(engine: TracedEngine, prompt: list[int]) -> None:
    """A pinned end token ends the answer unless ``ignore_eos`` or a read is requested."""
    end = engine.llm.get_tokenizer().eos_token_id
    own = pins({0: 40, 1: 41, 2: end})
    asked = [{}, {"ignore_eos": True}, {"extra_args": own | {"diffusion_read_only": True}}]
    sampling = [
        engine.sampling_params(**({"max_tokens": CANVAS, "extra_args": own} | one)) for one in asked
    ]
    first, *others = (one.outputs[0] for one in engine.outputs([prompt] * 3, sampling))
    assert first.finish_reason == "stop"
    assert list(first.token_ids) == [40, 41, end]
    for other in others:
        assert len(other.token_ids) == CANVAS
        assert list(other.token_ids[:3]) == [40, 41, end]


def constrained(engine: TracedEngine, regex: str | None, own: dict[str, Any], **more: Any) -> Any:
    form = {} if regex is None else {"structured_outputs": StructuredOutputsParams(regex=regex)}
    own = own | {"diffusion_max_steps": 4}
    return engine.sampling_params(max_tokens=CANVAS, seed=1, extra_args=own, **form, **more)


def test_pins_that_a_constraint_allows(engine: TracedEngine, prompt: list[int]) -> None:
    """The answer satisfies the constraint, and has the pinned tokens."""
    a, b = ids(engine, "ab")
    for tokens in ({0: a, 1: b}, {3: a}, {0: b, 4: a}):
        params = constrained(engine, "[a-z]{6}!", pins(tokens))
        answer = engine.outputs([prompt], params)[0].outputs[0]
        text = engine.llm.get_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
        assert len(text) == 7
        assert text[:6].islower()
        assert {position: answer.token_ids[position] for position in tokens} == tokens


@pytest.mark.parametrize("position", [0, 3])
def test_pins_that_a_constraint_does_not_allow(
    position: int, engine: TracedEngine, prompt: list[int]
) -> None:
    """A pin against the constraint ends the request with a reason, and no other one."""
    (digit,) = ids(engine, "7")
    own = pins({position: digit})
    # Without an end before the pin, after which it is not part of the answer.
    bad_word = {"bad_words": ["7"], "ignore_eos": True}
    sampling = [
        constrained(engine, "[a-z]{6}!", own),
        constrained(engine, None, own, **bad_word),
        constrained(engine, "[a-z]{6}!", {}),
    ]
    regex, words, free = (one.outputs[0] for one in engine.outputs([prompt] * 3, sampling))
    reason = f"does not allow the token of diffusion_pinned {position} there"
    assert (regex.finish_reason, regex.stop_reason) == ("error", f"structured_outputs {reason}")
    assert (words.finish_reason, words.stop_reason) == ("error", f"bad_words {reason}")
    assert free.finish_reason == "stop"
