"""Nemotron-Labs-Diffusion token after token: vLLM serves it as an ordinary causal model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engine import TracedEngine
from tests.support.families import nemotron
from tests.support.families.model import Nemotron, prompt_of
from tests.support.families.model import nemotron as tiny_nemotron
from tests.support.families.run import causal
from tests.support.generate import run_engine

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 80,
    "additional_config": {"diffusion": {"rule": "autoregressive"}},
}


@pytest.fixture(scope="module")
def model() -> Nemotron:
    return tiny_nemotron()


@pytest.fixture(scope="module")
def engine(model: Nemotron, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedEngine]:
    folder = model.save(tmp_path_factory.mktemp("autoregressive"))
    # A cache for one request of the longest.
    served = TracedEngine(folder, **OPTIONS, num_gpu_blocks_override=18)
    yield served
    served.close()


def generate(engine: TracedEngine, prompts: list[list[int]], **changes: Any) -> list[Any]:
    """Finished requests of one batch."""
    from vllm import SamplingParams

    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    return engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(**(options | changes)),
        use_tqdm=False,
    )


def test_tokens(engine: TracedEngine, model: Nemotron) -> None:
    """Chunked prompts, batches, lost memory: the plain loop's tokens."""
    prompts = [prompt_of(length, seed=length) for length in (1, 2, 31, 33, 64, 81, 100, 150)]
    engine.preempted.clear()
    outputs = generate(engine, prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        loop = nemotron.ar_generate(model, prompt, max_new_tokens=30)
        assert list(output.outputs[0].token_ids) == loop.tokens
    assert engine.preempted


def test_prefix_cache(engine: TracedEngine, model: Nemotron) -> None:
    """What is found of a turn before is what would be computed."""
    prompt = prompt_of(60, seed=41)
    (first,) = generate(engine, [prompt])
    longer = prompt + list(first.outputs[0].token_ids) + prompt_of(3, seed=43)
    (output,) = generate(engine, [longer])
    assert output.num_cached_tokens >= 80
    loop = nemotron.ar_generate(model, longer, max_new_tokens=30)
    assert list(output.outputs[0].token_ids) == loop.tokens


def test_what_canvases_do_not_have(engine: TracedEngine, model: Nemotron) -> None:
    """Penalties between one token and the next, prompt log-probabilities, grammars: vLLM's own."""
    from vllm.sampling_params import StructuredOutputsParams

    prompt = prompt_of(20, seed=3)
    penalty, said = 2.0, [0] * 320

    def penalised(ids: Tensor, visible: Tensor, **_: Any) -> Tensor:
        return model(ids, visible) - penalty * torch.tensor(said)

    tokens = list(prompt)
    for _ in range(20):
        ids = torch.tensor(tokens)
        tokens.append(int(penalised(ids, causal(len(ids)))[-1].argmax()))
        said[tokens[-1]] += 1
    (output,) = generate(engine, [prompt], frequency_penalty=penalty, max_tokens=20)
    assert list(output.outputs[0].token_ids) == tokens[len(prompt) :]

    (output,) = generate(engine, [prompt], prompt_logprobs=1, max_tokens=1)
    exact = model(torch.tensor(prompt), causal(len(prompt))).log_softmax(-1)
    for i, reported in enumerate(output.prompt_logprobs[1:]):
        token = prompt[i + 1]
        assert reported[token].logprob == pytest.approx(float(exact[i, token]), abs=2e-4)

    grammar = StructuredOutputsParams(regex=r"[a-f]{3,9} [0-9]{2}")
    (output,) = generate(engine, [prompt], structured_outputs=grammar, ignore_eos=False)
    tokenizer = engine.llm.get_tokenizer()
    text = tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert re.fullmatch(r"[a-f]{3,9} [0-9]{2}", text)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_processes(layout: str, model: Nemotron, tmp_path: Path) -> None:
    """Which know it as no diffusion model too."""
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 150)]
    params = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    batch = [{"prompt": prompt, "params": params} for prompt in prompts]
    options = {"kv_cache_memory_bytes": 64 * 1024**2, layout: 2}
    engine = OPTIONS | options | {"model": str(model.save(tmp_path)), "enforce_eager": True}
    (answers,) = run_engine({"engine": engine, "batches": [batch]})["batches"]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["tokens"] == nemotron.ar_generate(model, prompt, max_new_tokens=30).tokens
