"""The next turn of a chat loads from vLLM's offloaded cache what it would compute."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.doubles.torch_offloading import CONNECTOR
from tests.support.engines.engine import TracedEngine
from tests.support.models.checkpoints import random_checkpoint
from tests.support.models.prompts import prompt_of

pytestmark = pytest.mark.engine

BLOCK = 16


@pytest.fixture(
    scope="module",
    params=[
        "fused",
        pytest.param("asynchronous", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TracedEngine]:
    with TracedEngine(
        random_checkpoint(tmp_path_factory.mktemp("random")),
        language_model_only=True,
        async_scheduling=request.param == "asynchronous",
        # Layers with a window keep the blocks of answers too.
        prefix_cache_retention_interval=None,
        kv_transfer_config=CONNECTOR,
    ) as engine:
        yield engine


def settle(engine: TracedEngine) -> None:
    """Wait until the stores of finished requests and the passes on their way are done."""
    core = engine.llm.llm_engine.engine_core.engine_core
    while engine.scheduler.has_requests() or core.batch_queue:
        engine.llm.llm_engine.step()


def turn(engine: TracedEngine, prompt: list[int], num_tokens: int) -> Any:
    params = engine.sampling_params(seed=len(prompt), max_tokens=num_tokens, ignore_eos=True)
    (output,) = engine.outputs([prompt], [params])
    settle(engine)
    return output


@pytest.mark.parametrize(
    ("length", "num_tokens"),
    [
        (21, 70),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((33, 31), (32, 64), (90, 96))),
    ],
)
def test_next_turn(length: int, num_tokens: int, engine: TracedEngine) -> None:
    """The next turn gives the same tokens from offloaded blocks as from an empty cache."""
    scheduler = engine.scheduler
    first = turn(engine, prompt_of(length), num_tokens)
    chat = prompt_of(length) + list(first.outputs[0].token_ids) + prompt_of(40, 1)
    # Of the engine alone.
    assert scheduler.reset_prefix_cache()
    loaded = turn(engine, chat, 64)
    assert scheduler.reset_prefix_cache(reset_connector=True)
    computed = turn(engine, chat, 64)
    assert list(loaded.outputs[0].token_ids) == list(computed.outputs[0].token_ids)
    assert computed.num_cached_tokens == 0
    # Whole blocks of the prompt at least, and of the canvases that were encoded.
    assert loaded.num_cached_tokens >= (length + num_tokens - 32) // BLOCK * BLOCK
