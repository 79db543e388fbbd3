"""The engine's grammars are compiled in threads that it can leave, and end no thought."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_diffusion.scheduling import grammars


class Manager(StructuredOutputManager):
    """vLLM's manager of grammars, with no more than ends with it."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.executor_for_fillmask = ThreadPoolExecutor(1)
        self.fill_bitmask_parallel_threshold = 0
        limits = SimpleNamespace(max_num_seqs=1)
        model = SimpleNamespace(skip_tokenizer_init=False)
        self.vllm_config: Any = SimpleNamespace(scheduler_config=limits, model_config=model)
        self.backend = None


def test_endless_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that is never compiled becomes an error of its request, and the engine ends."""
    monkeypatch.setattr(grammars, "MOST_SECONDS", 0.1)
    manager, for_ever = Manager(), threading.Event()
    grammars.EngineGrammars.of(manager)
    waiting = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
    waiting.grammar = manager.executor.submit(for_ever.wait)
    while waiting.grammar is None:
        pass
    assert "takes more than 0.1 s" in str(waiting.grammar)
    manager.executor.submit(for_ever.wait)
    manager.clear_backend()
    for_ever.set()


CALL, END, TURN, STOP = 3, 5, 6, 7


def masked(manager_class: Any, *accepted: int) -> tuple[int, ...]:
    """Return what a manager masks in the thought of a request that has three end tokens, with a
    grammar that accepts some tokens, each of them first.
    """
    grammar = SimpleNamespace(
        validate_tokens=lambda tokens: [token for token in tokens[:1] if token in accepted]
    )
    params = SamplingParams(stop_token_ids=[TURN, STOP])
    params._eos_token_id = END
    manager: Any = object.__new__(manager_class)
    request: Any = SimpleNamespace(
        sampling_params=params,
        # As vLLM keeps what it has found once.
        structured_output_request=SimpleNamespace(
            masked_reasoning_end_ids=(CALL,), grammar=grammar
        ),
    )
    return tuple(manager._masked_reasoning_ends(request))


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [((), {CALL, END, TURN, STOP}), ((STOP,), {CALL, END, TURN})],
    ids=["a call", "an end or more"],
)
def test_ends_of_a_thought(accepted: tuple[int, ...], expected: set[int]) -> None:
    """In the autoregressive mode end tokens are masked unless they satisfy the grammar."""
    assert set(masked(grammars.OrdinaryGrammars, *accepted)) == expected


def test_ends_of_other_thoughts() -> None:
    """Canvases, whose thoughts have a rule of their own, keep the mask that vLLM makes."""
    assert masked(grammars.EngineGrammars) == (CALL,)
