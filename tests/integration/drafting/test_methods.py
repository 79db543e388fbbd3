"""vLLM's own methods of drafting on the CPU platform, and settings of ours: engine after engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.support import drafts
from tests.support.draft_engine import (
    NUM_DRAFTS,
    OPTIONS,
    PROMPTS,
    generate,
    metric,
    observed,
    prompt_of,
)
from tests.support.drafts import WINDOW
from tests.support.engine import TracedEngine
from tests.support.generate import run_engine
from vllm_diffusion.drafting.untrained_eagle3 import untrained_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def serving(
    folder: Path, kind: str, spec: dict[str, Any] | None, **options: Any
) -> Iterator[TracedEngine]:
    engine = TracedEngine(
        drafts.save_target(kind, folder / kind),
        **(OPTIONS | {"disable_log_stats": False} | options),
        speculative_config=spec,
    )
    try:
        yield engine
    finally:
        engine.close()


def assert_says_what_transformers_says(engine: TracedEngine, model: Any) -> None:
    """Eight at once, and again from the prefix cache."""
    for _ in range(2):
        for prompt, output in zip(PROMPTS, generate(engine, PROMPTS), strict=True):
            expected = drafts.greedy_tokens(model, prompt, 30)
            assert list(output.outputs[0].token_ids) == expected


def dflash(folder: Path, **changes: Any) -> dict[str, Any]:
    draft = drafts.save_draft(folder / "draft", **changes)
    return {"method": "dflash", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("kind", drafts.TARGETS)
def test_no_draft(kind: str, asynchronous: bool, models: Any, tmp_path: Path) -> None:
    """The target alone, prompts in chunks: what drafts are compared with otherwise."""
    with serving(tmp_path, kind, None, async_scheduling=asynchronous) as engine:
        assert engine.scheduler.vllm_config.scheduler_config.async_scheduling is asynchronous
        assert engine.runner.speculator is None
        assert_says_what_transformers_says(engine, models[kind])


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("kind", drafts.TARGETS)
def test_dflash(kind: str, asynchronous: bool, models: Any, tmp_path: Path) -> None:
    """Stock's class, with each kind of target, short of memory; Gemma 4's windows are 32 tokens."""
    options = {"num_gpu_blocks_override": 120 if kind == "gemma4" else 48}
    spec = dflash(tmp_path)
    with serving(tmp_path, kind, spec, async_scheduling=asynchronous, **options) as engine:
        assert type(engine.runner.speculator.model).__name__ == "DFlashQwen3ForCausalLM"
        assert engine.scheduler.vllm_config.scheduler_config.async_scheduling is asynchronous
        engine.preempted.clear()
        assert_says_what_transformers_says(engine, models[kind])
        assert engine.preempted
        assert metric(engine, "num_drafts") > 0


def test_fp8_cache(tmp_path: Path) -> None:
    """What is verified is read as coarsely as without a draft: the same tokens, of a random draft too."""
    said = []
    for number, spec in enumerate((None, dflash(tmp_path))):
        with serving(tmp_path / str(number), "qwen3", spec, kv_cache_dtype="fp8") as engine:
            outputs = generate(engine, PROMPTS)
            said.append([list(output.outputs[0].token_ids) for output in outputs])
            if spec is not None:
                assert metric(engine, "num_accepted_tokens") > 0
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", drafts.TARGETS)
def test_draft_model(kind: str, models: Any, tmp_path: Path) -> None:
    """The target itself as the draft: everything is accepted."""
    spec = {
        "method": "draft_model",
        "model": str(drafts.save_target(kind, tmp_path / "same")),
        "num_speculative_tokens": 3,
    }
    with serving(tmp_path, kind, spec) as engine:
        assert_says_what_transformers_says(engine, models[kind])
        drafted, accepted = (
            metric(engine, name) for name in ("num_draft_tokens", "num_accepted_tokens")
        )
        assert accepted > 0.9 * drafted


@pytest.mark.parametrize("kind", drafts.TARGETS)
def test_ngram(kind: str, models: Any, tmp_path: Path) -> None:
    spec = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    with serving(tmp_path, kind, spec) as engine:
        assert_says_what_transformers_says(engine, models[kind])
        assert metric(engine, "num_accepted_tokens") > 0


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_eagle3(kind: str, models: Any, tmp_path: Path) -> None:
    """A random head, three drafts one after another."""
    target = drafts.save_target(kind, tmp_path / "target")
    spec = untrained_eagle3(target, tmp_path / "head", 3)
    with serving(tmp_path, kind, spec) as engine:
        assert_says_what_transformers_says(engine, models[kind])
        assert metric(engine, "num_accepted_tokens") > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 7, "order": "position", "schedule": "linear"},
        {"steps": 2, "schedule": "sqrt", "window": WINDOW},
    ],
    ids=["position", "window"],
)
@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_passes(kind: str, settings: dict[str, Any], models: Any, tmp_path: Path) -> None:
    """A stock checkpoint served by ours, since something is set: windows far shorter than prompts."""
    additional = {"drafting": settings}
    options: dict[str, Any] = {
        "additional_config": additional,
        "async_scheduling": False,
        "num_gpu_blocks_override": 120,
    }
    with serving(tmp_path, kind, dflash(tmp_path), **options) as engine:
        assert type(engine.runner.speculator.model).__name__ == "DFlashMaskedDraftModel"
        assert_says_what_transformers_says(engine, models[kind])


@contextmanager
def draft_blocks(engine: TracedEngine) -> Iterator[list[int]]:
    """Count the KV blocks that the draft's layers hold after each step."""
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    (draft,) = (each for each in managers if isinstance(each.kv_cache_spec, SlidingWindowSpec))
    held: list[int] = []
    schedule = engine.scheduler.schedule

    def counting(*arguments: Any) -> Any:
        result = schedule(*arguments)
        blocks = [block for each in draft.req_to_blocks.values() for block in each]
        held.append(sum(not block.is_null for block in blocks))
        return result

    engine.scheduler.schedule = counting
    yield held
    engine.scheduler.schedule = schedule


def test_window(models: Any, tmp_path: Path) -> None:
    """A block's rows see as far as is set, and all where that is further than the context."""
    model, prompt = models["qwen3"], prompt_of(100, seed=5)
    full = drafts.draft_config()["dflash_config"]
    windowed = full | {"use_swa": True, "swa_window_size": WINDOW, "causal": False}
    known = drafts.features(model, prompt, full["target_layer_ids"])
    embedding = model.get_input_embeddings().weight
    for window, options in ((WINDOW, windowed), (200, full)):
        additional = {"drafting": {"window": window}}
        spec = dflash(tmp_path)
        with serving(tmp_path, "qwen3", spec, additional_config=additional) as engine:
            inner = engine.runner.speculator.model.model
            rows: list[tuple[Any, Any]] = []
            with observed(inner, "forward", rows), draft_blocks(engine) as held:
                # With one token nothing would be drafted.
                (output,) = generate(engine, [prompt], max_tokens=8)
        # Of 16 tokens each: those behind the window are given back.
        assert (max(held), held[-1]) == ((8, 5) if window == WINDOW else (9, 9))
        anchored = [each for each in rows if int(each[0][1][0]) == len(prompt)]
        (ids, *_), hidden = anchored[0]
        assert int(ids[0]) == output.outputs[0].token_ids[0]
        with torch.no_grad():
            reference = drafts.random_draft(dflash_config=options)
            expected = drafts.block_rows(reference, embedding[ids.long()], known)
        torch.testing.assert_close(hidden[1:], expected[1:], atol=1e-3, rtol=1e-3)


def test_stock_is_untouched(tmp_path: Path) -> None:
    """The same seeded and greedy answers with and without our models registered."""
    requests = [
        {"prompt": prompt_of(40, seed=3), "params": params | {"max_tokens": 24, "ignore_eos": True}}
        for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5})
    ]
    job = {
        "engine": OPTIONS
        | {
            "model": str(drafts.save_target("qwen3", tmp_path / "target")),
            "speculative_config": dflash(tmp_path) | {"draft_sample_method": "probabilistic"},
            "kv_cache_memory_bytes": 64 * 1024**2,
            "enforce_eager": True,
        },
        "batches": [[request] for request in requests],
    }
    with_ours = run_engine(job)
    alone = run_engine(job, VLLM_PLUGINS="vllm_diffusion_cpu")
    assert with_ours["batches"] == alone["batches"]


@pytest.mark.parametrize("sampled", [False, True], ids=["one-hot", "sampled"])
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_law(verification: str, sampled: bool, tmp_path: Path) -> None:
    """Chi-square of what vLLM's verifier says with our drafts at temperature 1: the target's law.

    Two tokens behind the first, which is the prompt's own, of 3,000 seeded requests. The target says
    the mask token too, which is never proposed.
    """
    from vllm import SamplingParams

    vocab, total = 12, 3000
    small = {"vocab_size": vocab}
    model = drafts.target_model("qwen3", **small)
    with torch.no_grad():
        # Flat enough that drafts are accepted and rejected often.
        model.lm_head.weight.mul_(0.1)
    model.save_pretrained(tmp_path / "qwen3")
    spec = dflash(
        tmp_path,
        **small,
        dflash_config={"mask_token_id": vocab - 1, "target_layer_ids": [0, 1]},
    )
    engine = TracedEngine(
        tmp_path / "qwen3",
        **(
            OPTIONS
            | {"disable_log_stats": False, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
        ),
        speculative_config=spec
        | {
            "draft_sample_method": "probabilistic" if sampled else "greedy",
            "rejection_sample_method": verification,
        },
        additional_config={"drafting": {"steps": 3}},
    )
    prompt = prompt_of(12, seed=9, vocab_size=vocab)
    try:
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompt}] * total,
            [
                SamplingParams(
                    temperature=1.0, seed=seed, max_tokens=3, ignore_eos=True, detokenize=False
                )
                for seed in range(total)
            ],
            use_tqdm=False,
        )
        accepted, drafted = metric(engine, "num_accepted_tokens"), metric(engine, "num_drafts")
    finally:
        engine.close()
    # Neither every draft nor none: both sides of the test are tried.
    assert 0.05 * drafted < accepted < 2 * drafted

    pairs = [[*prompt, first, second] for first in range(vocab) for second in range(vocab)]
    with torch.no_grad():
        law = model(torch.tensor(pairs)).logits.double().softmax(-1)
    begin = len(prompt) - 1
    # [first, second, third]
    joint = (
        law[0, begin][:, None, None]
        * law[::vocab, begin + 1][:, :, None]
        * law[:, begin + 2].view(vocab, vocab, vocab)
    )
    expected = total * joint.sum(0).flatten()
    said = torch.zeros(vocab, vocab, dtype=torch.float64)
    for output in outputs:
        _, second, third = output.outputs[0].token_ids
        said[second, third] += 1
    # What is expected seldom is one cell.
    often = expected >= 8
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    found = torch.cat([said.flatten()[often], said.flatten()[~often].sum()[None]])
    statistic = float(((found - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert degrees >= 20
    # Wilson and Hilferty's 99.99 % quantile.
    bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic < bound, (statistic, degrees)
    print(f"{verification} {sampled}: {statistic:.1f} of {degrees}, {accepted} of {drafted}")
