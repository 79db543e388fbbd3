"""Nothing of ours waits for the device in a step: no value is read, no shape depends on one."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.support.checkpoints import random_checkpoint
from tests.support.device_waits import DeviceWaits
from tests.support.engine import TracedEngine
from tests.support.families.model import nemotron, prompt_of
from tests.support.frames import EVERY_FIELD, Watched

pytestmark = pytest.mark.engine

CANVAS = 32


@pytest.fixture
def guarded(tmp_path):
    """An engine whose every call into the model state and the sampler is watched."""
    with TracedEngine(random_checkpoint(tmp_path), max_logprobs=-1) as engine:
        yield engine, *guard(engine)


def guard(engine):
    """What waits from now on, and how often each call is made."""
    found: list[str] = []
    calls: dict[str, int] = {}

    def watch(owner, name):
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args, **kwargs):
            batches = [a for a in args if hasattr(a, "seq_lens_cpu_upper_bound")]
            with DeviceWaits(tuple(b.seq_lens_cpu_upper_bound for b in batches)) as waits:
                out = original(*args, **kwargs)
            found.extend(waits.found)
            calls[name] = calls.get(name, 0) + 1
            return out

        setattr(owner, name, watched)

    for name in ("add_request", "apply_staged_writes", "prepare_inputs", "prepare_attn"):
        watch(engine.state, name)
    watched_sampler = type("WatchedSampler", (type(engine.runner.sampler),), {})
    engine.runner.sampler.__class__ = watched_sampler
    watch(watched_sampler, "__call__")
    watch(engine.runner.sampler.views, "prepare_output")
    return found, calls


def test_no_call_waits(guarded):
    """Prefill, denoise and encode of requests with every option, in one batch."""
    engine, found, calls = guarded
    rng = np.random.default_rng(0)
    prompts = [rng.integers(20, 276, n).tolist() for n in (5, 40, 90, 130)]
    options = [
        {"logprobs": 3, "extra_args": EVERY_FIELD},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 0.5},
        {"extra_args": {"diffusion_seed_canvas": [30] * CANVAS, "diffusion_pinned": [0, 3]}},
        {
            "logprob_token_ids": [40, 41],
            "extra_args": {"diffusion_read_only": True, "diffusion_constrained": True},
        },
    ]
    params = [
        engine.sampling_params(seed=i, max_tokens=2 * CANVAS, ignore_eos=True, **option)
        for i, option in enumerate(options)
    ]
    watched = Watched(engine.llm, prompts, params)
    tokens = [len(output.outputs[0].token_ids) for output in watched.outputs]
    assert tokens == [64, 64, 64, 32]
    assert len(watched.frames[0, 0]) > 2
    assert set(calls) == {
        "add_request",
        "apply_staged_writes",
        "prepare_inputs",
        "prepare_attn",
        "__call__",
        "prepare_output",
    }
    assert calls["__call__"] > 30
    assert found == []


@pytest.mark.slow
def test_no_call_of_a_draft_waits(tmp_path):
    """Drafts with a LoRA and their verification, with every option that these may have."""
    engine = TracedEngine(
        nemotron(block_length=8).save(tmp_path),
        max_model_len=256,
        additional_config={"diffusion": {"rule": "linear_spec"}},
    )
    found, calls = guard(engine)
    options = [
        {"logprobs": 3, "extra_args": EVERY_FIELD},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 0.5},
        {"min_tokens": 3, "stop_token_ids": [40], "logit_bias": {40: 2.0}},
        {"logprob_token_ids": [40, 41], "temperature": 0.7},
    ]
    params = [
        engine.sampling_params(seed=i, max_tokens=12, ignore_eos=True, **option)
        for i, option in enumerate(options)
    ]
    Watched(engine.llm, [prompt_of(n, seed=n) for n in (5, 40, 90, 130)], params)
    engine.close()
    assert calls["__call__"] > 10
    assert found == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: int(x[0]),
        lambda x: x.tolist(),
        lambda x: torch.zeros(2, device=x.device).tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x[x > 0],
        lambda x: x[[0, 1]],
        lambda x: torch.where(x > 0),
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: 3 if (x > 0).all() else 4,
        lambda x: x.__setitem__(torch.arange(2), 1),
    ],
)
def test_the_guard_sees_it(wait):
    x = torch.arange(4)
    with DeviceWaits() as waits:
        wait(x)
    assert len(waits.found) == 1


def test_the_guard_lets_the_host_be_read():
    with DeviceWaits() as waits:
        host = torch.from_numpy(np.arange(4))
        assert int(host[1:].max()) == 3
        assert torch.zeros(2, device=host.device).tolist() == [0, 0]
        torch.arange(4)[torch.arange(2)] = torch.arange(2)
    assert waits.found == []
