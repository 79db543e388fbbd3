"""Models whose canvas holds the whole sequence: what a start chooses, and where memory runs out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine import TracedEngine
from tests.support.families import model as tiny
from tests.support.families.cases import CASES, Wanted, expected
from tests.support.families.model import prompt_of
from tests.support.vllm_configs import configure

pytestmark = pytest.mark.engine


def test_a_start(tmp_path: Path) -> None:
    """A pass holds the longest sequence, no prefix is cached, and passes are synchronous."""
    config = configure(tiny.llada().save(tmp_path), max_model_len=None)
    assert config.model_config.max_model_len == 1024
    assert config.scheduler_config.max_num_batched_tokens >= 1024
    assert config.model_config.diffusion.spec.length == 1024
    assert not config.cache_config.enable_prefix_caching
    assert not config.scheduler_config.async_scheduling
    assert config.scheduler_config.max_num_seqs == 8


def test_a_small_pass_shortens_the_model(tmp_path: Path) -> None:
    """What cannot fit is refused by the number, as vLLM does at the model's length."""
    config = configure(tiny.llada().save(tmp_path), max_model_len=None, max_num_batched_tokens=300)
    assert config.model_config.max_model_len == 300
    assert config.model_config.diffusion.spec.length == 300


@pytest.mark.parametrize(("given", "length"), [(None, 2048), (3000, 3000)])
def test_dreams_length(tmp_path: Path, given: int | None, length: int) -> None:
    """That of the publisher's README, and not that of the model that it was trained from."""
    folder = tiny.dream(max_position_embeddings=4096).save(tmp_path)
    assert configure(folder, max_model_len=given).model_config.max_model_len == length


def test_little_memory(tmp_path: Path) -> None:
    """Six requests in memory for two: a sequence has all of its memory from its first pass on, or waits."""
    case = CASES["llada"]
    model = case.make()
    lengths = [90, 33, 5, 61, 17, 100]
    prompts = [prompt_of(length, seed=7 * length) for length in lengths]
    wanted = [
        Wanted(max_tokens=64, threshold=0.2, temperature=(i % 2) * 0.8, seed=i)
        for i in range(len(lengths))
    ]
    options = {"max_model_len": 192, "max_num_seqs": 6, "num_gpu_blocks_override": 26}
    with TracedEngine(model.save(tmp_path), **case.options, **options) as engine:
        outputs = engine.outputs(prompts, [one.sampling_params() for one in wanted])
        assert not engine.preempted
    for prompt, one, output in zip(prompts, wanted, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokens == expected(case, model, prompt, one).tokens, len(prompt)
