"""A step never waits for the device: it reads no value, and no shape depends on one."""

import functools

import numpy as np
import pytest

from attention_kernels.vocab_statistics import RowDraws, reference
from tests.support.counters.device_waits import DeviceWaits
from tests.support.engines.engine import TracedEngine
from tests.support.models.checkpoints import random_checkpoint
from tests.support.oracles.frames import EVERY_FIELD, Watched
from vllm_diffusion.sampling import candidate_filters
from vllm_diffusion.sampling.pass_settings import PassSettings

pytestmark = pytest.mark.engine

CANVAS = 32


@pytest.fixture
def guarded(tmp_path, monkeypatch):
    """Return an engine whose every call into the model state and the sampler is watched.

    It takes no shortcut by values that are there, as on a CPU, which is no device to wait for.
    """
    monkeypatch.setattr(RowDraws, "is_greedy", False)
    monkeypatch.setattr(PassSettings, "_read", lambda _: None)
    monkeypatch.setattr(candidate_filters, "_likeliest", lambda *_: None)
    monkeypatch.setattr(reference, "_noised", _noise_of_all)
    with TracedEngine(random_checkpoint(tmp_path), max_logprobs=-1) as engine:
        yield engine, *guard(engine)


def _noise_of_all(x, is_kept, first_id, draws):
    return x + draws.noise(x.shape[1], first_id)


def guard(engine):
    """Record what waits from now on, and how often each call is made."""
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
    """No call waits in prefill, denoise or encode of requests with every option, in one batch."""
    engine, found, calls = guarded
    rng = np.random.default_rng(0)
    prompts = [rng.integers(20, 276, n).tolist() for n in (5, 40, 90, 130, 7)]
    options = [
        {"logprobs": 3, "extra_args": EVERY_FIELD},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 0.5},
        {"extra_args": {"diffusion_seed_canvas": [30] * CANVAS, "diffusion_pinned": [0, 3]}},
        {
            "logprob_token_ids": [40, 41],
            "extra_args": {"diffusion_read_only": True, "diffusion_constrained": True},
        },
        {"extra_args": {"diffusion_prediction": "the red fox sat by the river, " * 4}},
    ]
    params = [
        engine.sampling_params(seed=i, max_tokens=2 * CANVAS, ignore_eos=True, **option)
        for i, option in enumerate(options)
    ]
    watched = Watched(engine.llm, prompts, params)
    tokens = [len(output.outputs[0].token_ids) for output in watched.outputs]
    assert tokens == [64, 64, 64, 32, 64]
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
