"""A batch in which one request has a setting of its own: the same canvases, from graphs.

The sampler runs without an engine; graphs are emulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.graphs import emulated_capture
from tests.support.kernel_checks import TensorMemory
from tests.support.plain_step import StepServer, StepShape
from tests.support.specs import diffusion_gemma_spec
from vllm_diffusion.canvas.messages import CanvasConstraint, CanvasConstraints
from vllm_diffusion.sampling.vocabulary_stream import TILE

SLOTS, VOCAB, CANVAS = 4, 300, 8
TOY = StepShape(diffusion_gemma_spec(CANVAS), VOCAB, hidden=16, slots=SLOTS, dtype="float32")
RUNNING, STEPS = 3, 3


def setting(value: float, dtype: torch.dtype) -> SimpleNamespace:
    """As vLLM holds one, of all slots."""
    values = torch.full((SLOTS,), value, dtype=dtype)
    return SimpleNamespace(gpu=values, np=values.numpy())


def params(**changes: Any) -> SimpleNamespace:
    defaults = {
        "logit_bias": None,
        "allowed_token_ids": None,
        "min_tokens": 0,
        "all_stop_token_ids": set(),
        "repetition_penalty": 1.0,
    }
    return SimpleNamespace(**({"extra_args": None} | defaults | changes))


@dataclass
class Kind:
    """What slot 1 asks for.

    Attributes:
        num_logprobs: Of each token; -1 for none.
        is_constrained: Whether the scheduler holds it to tokens, but for the second step.
        filters: Fields of vLLM's sampling states.
        changes: Of its sampling parameters.
    """

    num_logprobs: int = -1
    is_constrained: bool = False
    filters: dict[str, float] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)

    def message(self, i: int) -> CanvasConstraints | None:
        """Of step ``i``."""
        if not self.is_constrained or i == 1:
            return None
        mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
        mask[0] = 0b1110000
        constraint = CanvasConstraint((7, 8), mask, restart=i == 0, num_valid=0)
        return CanvasConstraints(["1"], None, constraints=[constraint])  # type: ignore[arg-type]


BIAS = {"logit_bias": {5: 3.0}, "min_tokens": 5, "all_stop_token_ids": {9}}
KINDS = {
    "top-p": Kind(filters={"top_p": 0.7}),
    "top-k": Kind(filters={"top_k": 4}),
    "min-p": Kind(filters={"min_p": 0.1}),
    "three filters": Kind(filters={"top_p": 0.9, "top_k": 9, "min_p": 0.01}),
    "penalty": Kind(changes={"repetition_penalty": 1.5}),
    "bias": Kind(changes=BIAS),
    "allowed": Kind(changes={"allowed_token_ids": [3, 4, 5]}),
    "log-probabilities": Kind(num_logprobs=3),
    "several": Kind(2, filters={"top_p": 0.8}, changes={"repetition_penalty": 1.5}),
    "constraint": Kind(is_constrained=True),
}


def server_of(kind: Kind, shape: StepShape = TOY, asking: Iterable[int] = (1,)) -> StepServer:
    """With requests in all slots, some of which ask for something."""
    server = StepServer(shape, torch.device("cpu"))
    sampler = server.sampler
    sampler.settings.states = SimpleNamespace(
        temperature=setting(1.0, torch.float32),
        seeds=SimpleNamespace(gpu=torch.arange(SLOTS) + 3),
        top_k=setting(shape.vocab, torch.int32),
        top_p=setting(1.0, torch.float32),
        min_p=setting(0.0, torch.float32),
        num_logprobs=np.full(SLOTS, -1),
        add_request=lambda slot, params: None,
        apply_staged_writes=lambda: None,
    )
    sampler.settings.token_ids = SimpleNamespace(
        num_token_ids=setting(0, torch.int32),
        token_ids=SimpleNamespace(gpu=torch.zeros(SLOTS, 4, dtype=torch.int32)),
        max_num_token_ids=lambda slots: 0,
        add_request=lambda slot, params: None,
        apply_staged_writes=lambda: None,
    )
    penalties = sampler.adjustments._state
    penalties.add_request = lambda slot, params: params.repetition_penalty != 1.0
    penalties.apply_staged_writes = lambda: None
    penalties.repetition_penalty = setting(1.5, torch.float32)
    penalties.frequency_penalty = setting(0.3, torch.float32)
    penalties.presence_penalty = setting(0.2, torch.float32)
    penalties.output_bin_counts.random_(0, 3, generator=torch.Generator().manual_seed(0))
    sampler.adjustments._prompt_len = SimpleNamespace(np=np.full(SLOTS, 7))
    for slot in range(SLOTS):
        sampler.add_request(slot, params(**kind.changes) if slot in asking else params())
    for name, value in kind.filters.items():
        getattr(sampler.settings.states, name).np[list(asking)] = value
    sampler.settings.states.num_logprobs[list(asking)] = kind.num_logprobs
    sampler.apply_staged_writes()
    return server


def run(server: StepServer, kind: Kind, running: int = RUNNING) -> list[dict[str, torch.Tensor]]:
    """State and outputs of some steps of the first requests."""
    generator = torch.Generator().manual_seed(5)
    batch = SimpleNamespace(req_ids=[str(i) for i in range(running)])
    server.begin(running)
    found = []
    for i in range(STEPS):
        server.lay_out(running)
        hidden = torch.randn(running * CANVAS, TOY.hidden, generator=generator)
        rows = server.sampler.select_rows(hidden)
        output = server.sampler(rows, batch, kind.message(i))
        reports = output.logprobs_tensors
        told = {"tokens": output.sampled_token_ids, "emitted": output.num_sampled}
        if reports is not None:
            # Of the others nobody asks.
            own = slice(CANVAS, 2 * CANVAS)
            told |= {name: getattr(reports, name)[own] for name in reports._fields[:3]}
        found.append({name: value.clone() for name, value in told.items()} | server.state())
    return found


@pytest.fixture(scope="module")
def plain() -> list[dict[str, torch.Tensor]]:
    with torch.inference_mode():
        return run(server_of(Kind()), Kind())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@torch.inference_mode()
def test_settings_in_graphs(plain, kind):
    """Every tensor as without graphs, and others' canvases as without the setting."""
    expected = run(server_of(kind), kind)
    replayed: Counter[str] = Counter()

    def capture(function: Any, inputs: Any) -> Any:
        replay = emulated_capture(function, inputs)

        def counted() -> Any:
            replayed[getattr(function, "__name__", str(function))] += 1
            return replay()

        return counted

    server = server_of(kind)
    hidden = torch.zeros(RUNNING * CANVAS, TOY.hidden)
    server.sampler.capture(capture, range(RUNNING, 0, -1), hidden)
    replayed.clear()
    found = run(server, kind)
    for before, after, without in zip(expected, found, plain, strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            if value.is_floating_point():
                torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(after[name], value), name
        assert torch.equal(after["canvas"][0], without["canvas"][0])
        assert torch.equal(after["canvas"][2], without["canvas"][2])
    # Once a step; only where nothing is asked of one the plain step is replayed instead.
    assert replayed["_adjusted_rows"] >= STEPS - 1
    assert replayed["_adjusted_rows"] + replayed["_plain_step"] == STEPS


@torch.inference_mode()
def test_biases_of_every_slot():
    """Graphs hold as many as there are requests."""
    server = server_of(Kind())
    hidden = torch.zeros(SLOTS * CANVAS, TOY.hidden)
    server.sampler.capture(emulated_capture, range(SLOTS, 0, -1), hidden)
    for slot in range(SLOTS):
        server.sampler.add_request(slot, params(**KINDS["bias"].changes))
    server.sampler.apply_staged_writes()
    assert server.sampler.graphs.adjusted_rows.is_captured(hidden)


@torch.inference_mode()
def test_rows_are_looked_at_again_a_canvas_at_a_time():
    """Without graphs, where all requests have filters and log-probabilities, few logits exist at once."""
    shape = replace(TOY, vocab=4 * TILE)
    kind = Kind(2, filters={"top_p": 0.8})
    server = server_of(kind, shape, range(SLOTS))
    with TensorMemory() as memory:
        run(server, kind, SLOTS)
    assert memory.largest_float32 == CANVAS * shape.vocab == SLOTS * CANVAS * TILE
