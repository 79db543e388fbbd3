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
    OPTIONS,
    PROMPTS,
    assert_greedy,
    draft_spec,
    generate,
    metric,
    observed,
    prompt_of,
    saved_target,
    serving,
)
from tests.support.drafts import TARGETS, WINDOW
from tests.support.engine import TracedEngine
from tests.support.generate import run_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ORDERS = ({"async_scheduling": True}, {"async_scheduling": False})
# Too few for eight requests; Gemma 4's windows take blocks of their own.
NUM_BLOCKS = {"qwen3": 48, "llama": 48, "gemma4": 120}
# Windows far shorter than prompts.
SETTINGS = (
    {"steps": 7, "order": "position", "schedule": "linear"},
    {"steps": 2, "schedule": "sqrt", "window": WINDOW},
)


@pytest.mark.parametrize(
    ("method", "kind", "drafting", "options"),
    [
        *((None, kind, None, order) for kind in TARGETS for order in ORDERS),
        *(
            ("dflash", kind, None, order | {"num_gpu_blocks_override": NUM_BLOCKS[kind]})
            for kind in TARGETS
            for order in ORDERS
        ),
        *(("draft_model", kind, None, {}) for kind in TARGETS),
        *(("ngram", kind, None, {}) for kind in TARGETS),
        *(("eagle3", kind, None, {}) for kind in ("qwen3", "llama")),
        *(
            ("dflash", kind, settings, ORDERS[1])
            for kind in ("llama", "gemma4")
            for settings in SETTINGS
        ),
    ],
)
def test_tokens(
    method: str | None,
    kind: str,
    drafting: dict[str, Any] | None,
    options: dict[str, Any],
    models: Any,
    tmp_path: Path,
) -> None:
    """The target's own: eight at once, in chunks, short of memory, and again from the prefix cache."""
    spec = method and draft_spec(tmp_path, method, kind)
    with serving(tmp_path, spec, drafting, kind, **options) as engine:
        if "async_scheduling" in options:
            scheduler = engine.scheduler.vllm_config.scheduler_config
            assert scheduler.async_scheduling is options["async_scheduling"]
        engine.preempted.clear()
        for _ in range(2):
            assert_greedy(engine, models[kind])
        if "num_gpu_blocks_override" in options:
            assert engine.preempted
        if method is None:
            assert engine.runner.speculator is None
            return
        drafted, accepted = (
            metric(engine, name) for name in ("num_draft_tokens", "num_accepted_tokens")
        )
        assert drafted > 0
        if method == "dflash":
            # A stock checkpoint is served by ours where something is set.
            served = "DFlashQwen3ForCausalLM" if drafting is None else "DFlashMaskedDraftModel"
            assert type(engine.runner.speculator.model).__name__ == served
        else:
            assert accepted > (0.9 * drafted if method == "draft_model" else 0)


def test_fp8_cache(tmp_path: Path) -> None:
    """What is verified is read as coarsely as without a draft: the same tokens, of a random draft too."""
    said = []
    for spec in (None, draft_spec(tmp_path)):
        with serving(tmp_path, spec, kv_cache_dtype="fp8") as engine:
            outputs = generate(engine, PROMPTS)
            said.append([list(output.outputs[0].token_ids) for output in outputs])
            if spec is not None:
                assert metric(engine, "num_accepted_tokens") > 0
    assert said[0] == said[1]


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
        with serving(tmp_path, draft_spec(tmp_path), {"window": window}) as engine:
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
            "model": str(saved_target(tmp_path)),
            "speculative_config": draft_spec(tmp_path) | {"draft_sample_method": "probabilistic"},
            "kv_cache_memory_bytes": 64 * 1024**2,
            "enforce_eager": True,
        },
        "batches": [[request] for request in requests],
    }
    with_ours = run_engine(job)
    alone = run_engine(job, VLLM_PLUGINS="vllm_diffusion_cpu")
    assert with_ours["batches"] == alone["batches"]


def test_law(tmp_path: Path) -> None:
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
    model.save_pretrained(tmp_path / "target-qwen3")
    dflash = {"mask_token_id": vocab - 1, "target_layer_ids": [0, 1]}
    drafts.save_draft(tmp_path / "draft", **small, dflash_config=dflash)
    prompt = prompt_of(12, seed=9, vocab_size=vocab)
    params = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
    many = {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
    with serving(tmp_path, draft_spec(tmp_path), {"steps": 3}, **many) as engine:
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompt}] * total,
            [SamplingParams(seed=seed, **params) for seed in range(total)],
            use_tqdm=False,
        )
        accepted, drafted = metric(engine, "num_accepted_tokens"), metric(engine, "num_drafts")
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
    print(f"{statistic:.1f} of {degrees}, {accepted} of {drafted}")


@pytest.mark.parametrize("sampled", [False, True], ids=["one-hot", "sampled"])
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_interpreted_verification(
    verification: str, sampled: bool, models: Any, tmp_path: Path
) -> None:
    """Kernels of vLLM's that are interpreted serve too: greedy requests and sampled ones, side by side."""
    from vllm import SamplingParams

    spec = draft_spec(tmp_path) | {
        "draft_sample_method": "probabilistic" if sampled else "greedy",
        "rejection_sample_method": verification,
    }
    with serving(tmp_path, spec, {"steps": 3}) as engine:
        assert_greedy(engine, models["qwen3"], PROMPTS[:1])
        prompts = [{"prompt_token_ids": prompt_of(12, seed=seed)} for seed in range(2)]
        params = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=6, ignore_eos=True)
            for seed in range(2)
        ]
        said = [
            [output.outputs[0].token_ids for output in engine.llm.generate(prompts, params)]
            for _ in range(2)
        ]
    assert [len(tokens) for tokens in said[0]] == [6, 6]
    assert said[0] == said[1]
