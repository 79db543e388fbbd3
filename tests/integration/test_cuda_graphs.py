"""Embedding and sampling replayed as graphs give the tokens that they give without.

Graphs are emulated (``tests/support/graphs.py``): a replay reads only what was captured, so an input
that a step forgets to hand over, or an output that outlives it, changes an answer here.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.checkpoints import random_checkpoint
from tests.support.engine import TracedEngine
from tests.support.graphs import emulated_capture

pytestmark = pytest.mark.engine

CANVAS = 32


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = TracedEngine(random_checkpoint(tmp_path_factory.mktemp("graphs")), max_logprobs=5)
    yield engine
    engine.close()


def test_replayed_steps_change_no_token(engine):
    """Whole and narrow canvases, a sampling setting beside plain requests, batches that shrink."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(20, 276, n).tolist() for n in (7, 30, 61, 90)]
    batches = [
        [{}],
        [{"temperature": 0.7}, {"temperature": 0.0}],
        [{}, {"max_tokens": 5}, {"max_tokens": CANVAS}],
        [{}, {"top_p": 0.8}, {"logprobs": 2}, {"max_tokens": 3 * CANVAS}],
    ]

    def answers() -> list[list[int]]:
        found = []
        for options in batches:
            params = [
                engine.sampling_params(
                    **({"seed": i, "max_tokens": 2 * CANVAS, "ignore_eos": True} | option)
                )
                for i, option in enumerate(options)
            ]
            outputs = engine.llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts[: len(params)]],
                params,
                use_tqdm=False,
            )
            found += [list(output.outputs[0].token_ids) for output in outputs]
        return found

    expected = answers()
    replays = []

    def counted(function, inputs):
        replay = emulated_capture(function, inputs)

        def run():
            replays.append((function.__name__, len(inputs[0]) // CANVAS))
            return replay()

        return run

    engine.state.capture_graphs(counted, 4)
    assert answers() == expected
    assert {name for name, _ in replays} == {"_plain_step", "_condition_canvases"}
    assert {n for name, n in replays if name == "_condition_canvases"} >= {1, 2, 4}

    # As after vLLM's memory profile.
    engine.state.drop_graphs()
    replays.clear()
    assert answers() == expected
    assert not replays
