"""An answer with a grammar does not end within a thought, in our autoregressive mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.vllm_configs import vllm_config
from vllm_diffusion.startup.plan import DiffusionPlan
from vllm_diffusion.startup.plugin_settings import PluginSettings

CALL, END, TURN, STOP = 3, 5, 6, 7


class Grammar:
    """Accepts some tokens, each as the first."""

    def __init__(self, *accepted: int) -> None:
        self._accepted = accepted

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens[:1] if token in self._accepted]


def masked(plan: DiffusionPlan | None, grammar: Grammar) -> tuple[int, ...]:
    """What vLLM's manager masks in a thought of a request that ends at three tokens."""
    from vllm import SamplingParams
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_diffusion.scheduling import grammars

    grammars.install()
    params = SamplingParams(stop_token_ids=[TURN, STOP])
    params._eos_token_id = END
    manager: Any = object.__new__(StructuredOutputManager)
    manager.vllm_config = vllm_config()
    manager.vllm_config.model_config.diffusion = plan
    request: Any = SimpleNamespace(
        sampling_params=params,
        # As vLLM keeps what it has found once.
        structured_output_request=SimpleNamespace(
            masked_reasoning_end_ids=(CALL,), grammar=grammar
        ),
    )
    return manager._masked_reasoning_ends(request)


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [((), {CALL, END, TURN, STOP}), ((STOP,), {CALL, END, TURN})],
    ids=["a call", "an end or more"],
)
def test_ends_of_a_thought(accepted: tuple[int, ...], expected: set[int]) -> None:
    """Ends are masked next to vLLM's own tokens, but for those that satisfy the grammar."""
    plan = DiffusionPlan(PluginSettings(rule="autoregressive"))
    assert set(masked(plan, Grammar(*accepted))) == expected


@pytest.mark.parametrize("plan", [None, DiffusionPlan()], ids=["another model", "canvases"])
def test_ends_of_other_thoughts(plan: DiffusionPlan | None) -> None:
    """Other models are vLLM's, and canvases have a rule of their own."""
    assert masked(plan, Grammar()) == (CALL,)
