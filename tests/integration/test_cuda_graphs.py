"""Embedding and sampling replayed as graphs give the tokens that they give without.

Graphs are emulated (``tests/support/doubles/graphs.py``): a replay reads only what was captured, so
an input that a step forgets to hand over, or an output that outlives it, changes an answer here.
"""

from typing import Any

import numpy as np
import pytest

from tests.support.doubles.graphs import emulated_capture
from tests.support.engines.engine import TracedEngine

pytestmark = pytest.mark.engine

CANVAS = 32


@pytest.fixture
def engine(checkpoint):
    with TracedEngine(checkpoint, max_logprobs=5) as engine:
        yield engine


@pytest.mark.slow
def test_replayed_steps_change_no_token(engine):
    """Replays change no token of canvases of any width and setting, or in shrinking batches."""
    from vllm.sampling_params import StructuredOutputsParams

    choice = StructuredOutputsParams(choice=["ab", "cd"])
    rng = np.random.default_rng(1)
    prompts = [rng.integers(20, 276, n).tolist() for n in (7, 30, 61, 90)]
    batches = [
        [{}],
        [{"temperature": 0.7}, {"temperature": 0.0}],
        [{}, {"max_tokens": 5}, {"max_tokens": CANVAS}],
        [{}, {"top_p": 0.8}, {"logprobs": 2}, {"max_tokens": 3 * CANVAS}],
        [{}, {"top_k": 5, "min_p": 0.05, "top_p": 0.9}, {"repetition_penalty": 1.3}],
        [{"logit_bias": {30: 3.0}, "min_tokens": 9}, {}, {"allowed_token_ids": [30, 31, 32]}],
        [{"logprobs": 1, "top_p": 0.7, "presence_penalty": 0.5}, {"max_tokens": 5}],
        [{"structured_outputs": choice, "ignore_eos": False}, {"top_k": 3}],
        # After them, so that what they left is in nobody's way.
        [{}, {"top_p": 0.8}],
    ]

    # Few steps a canvas do: every kind of pass is among them.
    few = {"diffusion_max_steps": 3}
    defaults = {"max_tokens": 2 * CANVAS, "ignore_eos": True, "extra_args": few}

    def answers() -> list[tuple[list[int], Any]]:
        found = []
        for options in batches:
            params = [
                engine.sampling_params(**(defaults | {"seed": i} | option))
                for i, option in enumerate(options)
            ]
            outputs = engine.outputs(prompts[: len(params)], params)
            for output in outputs:
                told = output.outputs[0]
                found.append((list(told.token_ids), numbers(told.logprobs)))
        return found

    expected = answers()
    replays = []

    def counted(function, inputs):
        replay = emulated_capture(function, inputs)

        def run():
            replays.append((function.__name__, len(inputs[0]) // CANVAS if inputs else 0))
            return replay()

        return run

    engine.state.graphs.capture(counted)
    assert answers() == expected
    assert {name for name, _ in replays} == {
        "plain_step",
        "_condition_canvases",
        "adjusted_rows",
        "filtered_rows",
        "reported_rows",
        "decide",
    }
    assert {n for name, n in replays if name == "_condition_canvases"} >= {1, 2, 4}

    # As after vLLM's memory profile.
    engine.state.graphs.drop()
    replays.clear()
    assert answers() == expected
    assert not replays


def numbers(logprobs: Any) -> list[dict[int, tuple[int, float]]]:
    """Return rank and rounded log-probability of each token that is reported at each position."""
    return [
        {token: (told.rank, pytest.approx(told.logprob, abs=1e-4)) for token, told in some.items()}
        for some in logprobs or []
    ]
