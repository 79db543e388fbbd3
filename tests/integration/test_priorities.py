"""``--scheduling-policy priority``: the urgent first, and the tokens are what they are without."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import SHIPPED
from tests.support.engine import TracedEngine
from tests.support.prompts import prompt_of

pytestmark = pytest.mark.engine

PRIORITIES = {"patient": 5, "more patient": 6, "urgent": 0}


def test_urgent_first() -> None:
    """One at a time: those that wait go by priority, and by arrival where that is the same."""
    engine = TracedEngine(SHIPPED, scheduling_policy="priority", max_num_seqs=1)
    try:
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
        ended = []
        while engine.llm.llm_engine.has_unfinished_requests():
            for output in engine.llm.llm_engine.step():
                if output.finished:
                    ended.append(output.request_id)
                    assert output.outputs[0].token_ids == alone[output.request_id]
        assert ended == ["urgent", "patient", "more patient"]
    finally:
        engine.close()
