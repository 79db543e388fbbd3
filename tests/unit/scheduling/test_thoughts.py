"""An answer with a grammar does not end within a thought in the autoregressive mode."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_diffusion.scheduling.grammars import EngineGrammars, OrdinaryGrammars

CALL, END, TURN, STOP = 3, 5, 6, 7


class Grammar:
    """A grammar that accepts some tokens, each of them first."""

    def __init__(self, *accepted: int) -> None:
        self._accepted = accepted

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens[:1] if token in self._accepted]


def masked(manager_class: Any, grammar: Grammar) -> tuple[int, ...]:
    """Return what a manager masks in the thought of a request that has three end tokens."""
    from vllm import SamplingParams

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
    assert set(masked(OrdinaryGrammars, Grammar(*accepted))) == expected


def test_ends_of_other_thoughts() -> None:
    """Canvases, whose thoughts have a rule of their own, keep the mask that vLLM makes."""
    assert masked(EngineGrammars, Grammar()) == (CALL,)
