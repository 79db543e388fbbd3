"""A read of one step computes no soft embeddings, and one limited to a few ids no other logits."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.engines.engine import TracedEngine
from tests.support.models.prompts import prompt_of
from vllm_diffusion.sampling import output_head, vocabulary_stream
from vllm_diffusion.sampling.pass_settings import PassSettings

pytestmark = pytest.mark.engine

CANVAS, TILE, NUM_TILES = 32, 64, 5
ONE_STEP = {"diffusion_read_only": True, "diffusion_max_steps": 1}
HELD = {"diffusion_constrained": True}
IDS = [40, 41, 300]
PLAIN: dict[str, Any] = {"max_tokens": 2 * CANVAS}
# As vLLM's decisions ask: the whole vocabulary's probabilities of a few ids.
READ: dict[str, Any] = {"logprob_token_ids": IDS, "extra_args": ONE_STEP}
HELD_READ: dict[str, Any] = {"logprob_token_ids": IDS, "extra_args": ONE_STEP | HELD}
HELD_ANSWER: dict[str, Any] = PLAIN | {"logprob_token_ids": IDS, "extra_args": HELD}


@pytest.fixture(scope="module")
def engine(checkpoint, order):
    with TracedEngine(checkpoint, async_scheduling=order == "asynchronous") as engine:
        yield engine


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(vocabulary_stream, "TILE", TILE)
    monkeypatch.setattr(output_head, "_CONVERTED_AT_ONCE", TILE)


def answers(engine: TracedEngine, batch: list[dict[str, Any]]) -> list[Any]:
    """Return tokens, log-probabilities and ranks, to the bit, of requests that run together."""
    params = [
        engine.sampling_params(**({"seed": i, "max_tokens": CANVAS, "ignore_eos": True} | options))
        for i, options in enumerate(batch)
    ]
    prompts = [prompt_of(9 + 20 * i, seed=i) for i in range(len(batch))]
    assert engine.llm.reset_prefix_cache()
    found = []
    for output in engine.outputs(prompts, params):
        (answer,) = output.outputs
        reports = [
            {token: (told.rank, told.logprob) for token, told in some.items()}
            for some in answer.logprobs or []
        ]
        found.append((list(answer.token_ids), reports))
    return found


BATCHES = {
    "reads": [READ, READ],
    "held reads": [HELD_READ, HELD_READ | {"logprob_token_ids": [7, 130]}],
    "held answers": [HELD_ANSWER, HELD_READ],
    "all": [PLAIN, READ, HELD_READ, HELD_ANSWER, PLAIN | {"top_p": 0.9}],
    "with other settings": [
        HELD_READ | {"top_k": 2, "temperature": 0.7},
        HELD_ANSWER | {"logit_bias": {40: -2.0}, "min_tokens": CANVAS},
        HELD_READ | {"allowed_token_ids": [41, 99], "presence_penalty": 0.5},
        READ | {"logprob_token_ids": None},
    ],
    "pinned": [
        HELD_READ
        | {
            "extra_args": ONE_STEP
            | HELD
            | {"diffusion_seed_canvas": [200] * CANVAS, "diffusion_pinned": [0]}
        }
    ],
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_what_is_left_out_changes_no_answer(engine, monkeypatch, batch):
    """Tokens and log-probabilities have the bits of passes that compute everything."""
    found = answers(engine, batch)
    used = PassSettings.used

    def everything(self: PassSettings, num_masks: int | None) -> Any:
        return replace(used(self, num_masks), allowed_ids=None, has_next_step=True)

    monkeypatch.setattr(PassSettings, "used", everything)
    assert found == answers(engine, batch)


# Of both heads' products and the embedding's, how many ids of the vocabulary they multiply for a
# row.
VOCAB = TILE * NUM_TILES
WITH_EVERYTHING = 3 * VOCAB


@pytest.mark.parametrize(
    ("batch", "num_ids"),
    [
        ([READ], 2 * VOCAB),
        ([READ | {"logprob_token_ids": None}], VOCAB),
        ([HELD_READ], 2 * 2 * TILE),
        ([HELD_READ, HELD_READ | {"logprob_token_ids": [130]}], 2 * 3 * TILE),
        ([READ, READ | {"extra_args": ONE_STEP | {"diffusion_max_steps": 2}}], WITH_EVERYTHING),
    ],
    ids=["read", "without log-probabilities", "held", "held to several", "beside two steps"],
)
def test_ids_that_a_read_multiplies(engine, monkeypatch, batch, num_ids):
    """A read multiplies no ids for a further step, and no tile without an allowed id."""
    head = engine.runner.sampler.head
    passes: list[float] = []
    num_rows = 0
    call, matmul = type(engine.runner.sampler).__call__, head.matmul

    def counted_call(self: Any, rows: Any, *args: Any) -> Any:
        nonlocal num_rows
        num_rows = len(rows)
        passes.append(0)
        return call(self, rows, *args)

    def counted(rows: Any, weight: Any) -> Any:
        passes[-1] += len(rows) * (weight.numel() // head.weight.shape[1]) / num_rows
        return matmul(rows, weight)

    monkeypatch.setattr(type(engine.runner.sampler), "__call__", counted_call)
    object.__setattr__(head, "matmul", counted)
    try:
        answers(engine, batch)
    finally:
        object.__setattr__(head, "matmul", matmul)
    assert next(n for n in passes if n) == num_ids
