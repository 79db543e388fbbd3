"""vLLM's own drafting methods on the CPU platform, and this package's settings, one engine after
another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.support.engines.draft_engine import (
    PROMPTS,
    assert_greedy,
    draft_spec,
    generate,
    metric,
    observed,
    prompt_of,
    serving,
)
from tests.support.engines.engine import TracedEngine
from tests.support.models import drafts
from tests.support.models.drafts import TARGETS, WINDOW

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
    method: str,
    kind: str,
    drafting: dict[str, Any] | None,
    options: dict[str, Any],
    models: Any,
    tmp_path: Path,
) -> None:
    """With every drafting method the answers are the target's own for eight requests at once, in
    chunks, with preemptions, and again from the prefix cache.
    """
    spec = draft_spec(tmp_path, method, kind)
    with serving(tmp_path, spec, drafting, kind, **options) as engine:
        if "async_scheduling" in options:
            scheduler = engine.scheduler.vllm_config.scheduler_config
            assert scheduler.async_scheduling is options["async_scheduling"]
        engine.preempted.clear()
        for _ in range(2):
            assert_greedy(engine, models[kind])
        if "num_gpu_blocks_override" in options:
            assert engine.preempted
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
    """With an FP8 KV cache a server with a random draft gives the same tokens as one without a
    draft.
    """
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
    """The rows of a draft's block see as many tokens as the window holds, and the whole context
    where the window is longer.
    """
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
