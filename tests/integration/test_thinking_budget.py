"""With ``thinking_token_budget`` a thought ends in time, and shorter ones are unchanged."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines.engine import SYNCHRONOUS_OFTEN, TracedEngine

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": "What is 7+8?"}]
BUDGETS = (0, 1, 3, 40, None)


@pytest.fixture(scope="module", params=SYNCHRONOUS_OFTEN)
def engine(request: pytest.FixtureRequest, weights: Path) -> Iterator[TracedEngine]:
    with TracedEngine(
        weights,
        reasoning_parser="gemma4",
        # As a server sets it: a constraint begins after the thought.
        structured_outputs_config={"reasoning_parser": "gemma4"},
        async_scheduling=request.param,
        max_num_seqs=8,
    ) as engine:
        yield engine


def _thoughts(engine: TracedEngine, **params: object) -> list[tuple[list[int], list[int]]]:
    """Return for each budget the thought that the prompt opens, and what comes after it."""
    marks = engine.scheduler.vllm_config.reasoning_config
    (end,) = marks.natural_reasoning_end_token_ids
    prompt = engine.llm.get_tokenizer().apply_chat_template(
        MESSAGES, add_generation_prompt=True, enable_thinking=True, return_dict=False
    )
    prompt = {"prompt_token_ids": prompt + marks.reasoning_start_token_ids}
    sampling = [
        engine.sampling_params(
            seed=3, max_tokens=96, temperature=1.0, thinking_token_budget=budget, **params
        )
        for budget in BUDGETS
    ]
    outputs = engine.llm.generate([prompt] * len(BUDGETS), sampling, use_tqdm=False)
    found = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        cut = tokens.index(end) if end in tokens else len(tokens)
        found.append((tokens[:cut], tokens[cut + 1 :]))
    return found


def test_thoughts(engine: TracedEngine) -> None:
    """No thought exceeds its budget, and one that is shorter anyway is unchanged."""
    *limited, (thought, answer) = _thoughts(engine, ignore_eos=True)
    for (short, behind), budget in zip(limited, BUDGETS, strict=False):
        assert len(short) == min(budget, len(thought))
        if len(thought) <= budget:
            assert (short, behind) == (thought, answer)
    assert len(thought) > 3


def test_with_an_expression(engine: TracedEngine) -> None:
    """The constraint of the answer begins after the thought, however that ended."""
    from vllm.sampling_params import StructuredOutputsParams

    regex = StructuredOutputsParams(regex="[0-9]{2}")
    tokenizer = engine.llm.get_tokenizer()
    found = _thoughts(engine, structured_outputs=regex)
    for (thought, answer), budget in zip(found, BUDGETS[:-1], strict=False):
        assert len(thought) <= budget
        assert re.fullmatch("[0-9]{2}", tokenizer.decode(answer, skip_special_tokens=True))
