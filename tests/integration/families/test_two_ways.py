"""Tests of DiffusionGemma's ``autoregressive``, its encoder, and its verified drafts.

The oracle is transformers' Gemma 4 with the encoder's tensors. Encoder and decoder differ in their
``layer_scalar``, so that a row with the other stack's scalar is found.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.engines.generate import tokens_of_batch
from tests.support.families.cases import Wanted
from tests.support.families.model import prompt_of
from tests.support.models.checkpoints import random_checkpoint
from tests.support.models.drafts import greedy_tokens
from tests.support.oracles.gemma4 import encoder_as_gemma4, logits_of
from tests.support.oracles.oracle import Oracle

pytestmark = pytest.mark.engine

AUTOREGRESSIVE = {"rule": "autoregressive"}
DRAFTS = {"rule": "linear_spec"}
# Chunks of 80 tokens, and a cache that holds few requests.
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 80,
    "num_gpu_blocks_override": 34,
    # Otherwise layers with a window keep blocks at the end of a prompt only.
    "prefix_cache_retention_interval": None,
}
LENGTHS = (1, 2, 7, 33, 64, 81, 150, 120)
# vLLM's parameters, with ``max_tokens`` as the only end.
params = Wanted(max_tokens=30, strategy=None, threshold=None).sampling_params


def two_scalars(folder: Path) -> Path:
    """Return a random checkpoint whose encoder and decoder scale each layer differently."""
    random_checkpoint(folder, seed=2, gain=1.0, embed=1.0)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(3)
    for name in sorted(tensors):
        if name.endswith("layer_scalar"):
            tensors[name] = 0.6 + 0.8 * torch.rand(tensors[name].shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_scalars(tmp_path_factory.mktemp("scalars"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return encoder_as_gemma4(checkpoint)


def way(settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return options of an engine."""
    return OPTIONS | {"additional_config": {"diffusion": settings}} | options


WAYS = [
    way(AUTOREGRESSIVE),
    pytest.param(way(DRAFTS), marks=pytest.mark.slow),
    pytest.param(
        way(DRAFTS | {"draft_length": 8, "draft_steps": 2}, async_scheduling=True),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        way(DRAFTS | {"draft_length": 32, "draft_steps": 4}, async_scheduling=False),
        marks=pytest.mark.slow,
    ),
    pytest.param(way(AUTOREGRESSIVE, async_scheduling=True), marks=pytest.mark.slow),
]
drafts = pytest.mark.parametrize("engine", [way(DRAFTS)], indirect=True, ids=["drafts"])


@pytest.fixture(scope="module", params=WAYS, ids=["causal", "drafts", "steps", "long", "async"])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[TracedEngine]:
    with TracedEngine(checkpoint, **request.param) as served:
        yield served


def test_greedy_tokens(engine: TracedEngine, oracle: Any) -> None:
    """Chunks, batches and preemptions give the encoder's tokens and log-probabilities."""
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    engine.preempted.clear()
    outputs = engine.outputs(prompts, params(logprobs=3))
    assert any(len(set(answer)) > 5 for answer in tokens_of(outputs))
    assert engine.preempted
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        exact = logits_of(oracle, [*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
        # The loop's own tokens: each is the likeliest after those before it.
        assert list(completion.token_ids) == exact.argmax(-1).tolist()
        assert len(completion.token_ids) == 30
        for row, reported in zip(exact.log_softmax(-1), completion.logprobs, strict=True):
            for token, one in reported.items():
                assert one.logprob == pytest.approx(float(row[token]), abs=2e-5)


def test_prefix_cache(engine: TracedEngine, oracle: Any) -> None:
    """The next turn finds the keys and values of the last answer."""
    assert engine.llm.reset_prefix_cache()
    prompt = prompt_of(60, seed=41)
    (answer,) = tokens_of(engine.outputs([prompt], params(max_tokens=90)))
    later = prompt + answer + prompt_of(3, seed=43)
    (output,) = engine.outputs([later], params())
    assert output.num_cached_tokens > len(prompt)
    assert tokens_of([output]) == [greedy_tokens(oracle, later, 30)]


@pytest.mark.slow
def test_same_draws_for_every_draft(checkpoint: Path) -> None:
    """At a temperature a seed gives the same tokens for any number of drafts and steps."""
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    wanted = [params(temperature=1.5, seed=i) for i in range(len(prompts))]
    answers = []
    for settings in ({"draft_length": 5, "draft_steps": 3}, {"draft_length": 16}):
        with TracedEngine(checkpoint, **way(DRAFTS | settings)) as served:
            answers.append(tokens_of(served.outputs(prompts, wanted)))
    assert answers[0] == answers[1]


def test_scalars_of_a_canvas(checkpoint: Path) -> None:
    """Denoising uses the decoder's scalars and known tokens the encoder's, as in transformers."""
    reference = Oracle(checkpoint)
    prompts = [prompt_of(length, seed=length) for length in (5, 40)]
    with TracedEngine(checkpoint, max_model_len=256) as served:
        for prompt in prompts:
            with served.recording() as steps:
                served.generate(
                    [prompt], seeds=[1], max_tokens=64, temperature=1.0, ignore_eos=True
                )
            denoised = [one for one in steps if not one.encoding]
            exact = reference.follow(
                prompt, [one.canvas for one in denoised], [one.logits for one in denoised]
            )
            for ours, theirs in zip(denoised, exact, strict=False):
                assert (ours.logits - theirs).abs().max() < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("settings", [AUTOREGRESSIVE, DRAFTS], ids=["causal", "drafts"])
def test_two_processes(settings: dict[str, Any], checkpoint: Path, oracle: Any) -> None:
    """Two processes give the tokens of one."""
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 150)]
    asked = {"max_tokens": 30, "temperature": 0.0, "seed": 0, "ignore_eos": True}
    requests = [{"prompt": prompt, "params": asked} for prompt in prompts]
    found = tokens_of_batch(checkpoint, requests, **way(settings, tensor_parallel_size=2))
    assert found == [greedy_tokens(oracle, prompt, 30) for prompt in prompts]
