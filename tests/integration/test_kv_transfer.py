"""Prompts prefilled by one engine and denoised by another, and what a connector is offered.

Both engines are one here: see ``tests/support/memory_connector.py``. Two servers are in
``tests/end_to_end/test_disaggregated.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import torch_offloading
from tests.support.engine import TracedEngine
from tests.support.families.cases import LAYOUTS, checkpoint_of
from tests.support.memory_connector import Kept, MemoryConnector
from tests.support.prompts import prompt_of
from vllm_diffusion.metrics import DiffusionRequestMetrics, request_metrics

pytestmark = pytest.mark.engine

# Below a block of the cache, at its end, beyond it, several windows, and more than a pass holds.
LENGTHS = (1, 15, 16, 33, 90, 150)
# Canvases that end with the answer, and that it cuts.
NUM_TOKENS = 70
PREFILL = {"kv_transfer_params": {"do_remote_decode": True}}
MEMORY = {
    "kv_connector": "MemoryConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "tests.support.memory_connector",
}
SEVERAL = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [MEMORY, torch_offloading.CONNECTOR]},
}


class Engine:
    """An engine whose connector keeps what requests leave."""

    def __init__(
        self,
        family: str,
        folder: Path,
        *,
        is_asynchronous: bool,
        connector: dict[str, Any] = MEMORY,
        num_stages: int = 1,
    ) -> None:
        checkpoint, needed = checkpoint_of(family, folder)
        options: dict[str, Any] = {"max_model_len": 256, **needed}
        self.traced = TracedEngine(
            checkpoint,
            language_model_only=True,
            async_scheduling=is_asynchronous,
            max_num_batched_tokens=128,
            # So that nothing but the connector brings a prompt.
            enable_prefix_caching=False,
            kv_transfer_config=connector | {"kv_load_failure_policy": "recompute"},
            pipeline_parallel_size=num_stages,
            **options,
        )
        self.spec = self.traced.scheduler.spec

    def generate(self, lengths: tuple[int, ...], extra: list[dict[str, Any]]) -> list[Any]:
        """Finished requests, all in one batch."""
        params = [
            self.traced.sampling_params(
                seed=length,
                temperature=1.0,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                extra_args=each,
            )
            for length, each in zip(lengths, extra, strict=True)
        ]
        return self.run([prompt_of(length) for length in lengths], params)

    def run(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        outputs = self.traced.outputs(prompts, params)
        # The connector takes what finished requests left when the engine runs next.
        core = self.traced.llm.llm_engine.engine_core.engine_core
        while self.traced.scheduler.requests or core.batch_queue:
            self.traced.llm.llm_engine.step()
        return outputs

    def plain(self, lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
        return self.generate(lengths, [{}] * len(lengths))

    def num_prefilled(self, length: int) -> int:
        """Tokens of a prompt that are final before its first canvas is."""
        return length - self.spec.num_given(length)

    def handed_over(self, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
        """What loads these prompts; nothing of them was denoised."""
        outputs = self.generate(lengths, [PREFILL] * len(lengths))
        for length, output in zip(lengths, outputs, strict=True):
            (completion,) = output.outputs
            assert (list(completion.token_ids), completion.finish_reason) == ([], "length")
            assert (output.kv_transfer_params is None) == (self.num_prefilled(length) == 0)
            if output.kv_transfer_params is not None:
                taken = taken_by(output)
                assert (taken.encode_rows, taken.canvas_rows) == (self.num_prefilled(length), 0)
        return [{"kv_transfer_params": output.kv_transfer_params} for output in outputs]

    def num_loaded(self, length: int) -> int:
        """Tokens of a prompt that are not computed again: stock computes the last one in any case."""
        unit = self.spec.layout.alignment
        return (length - 1) // unit * unit


def _parameters() -> Iterator[Any]:
    for order in ("synchronous", "asynchronous"):
        yield pytest.param(("gemma", order), id=order)
        for family in LAYOUTS:
            yield pytest.param((family, order), id=f"{family}-{order}", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=_parameters())
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    family, order = request.param
    engine = Engine(
        family, tmp_path_factory.mktemp("model"), is_asynchronous=order == "asynchronous"
    )
    yield engine
    engine.traced.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    ("connector", "num_stages"),
    [
        pytest.param(MEMORY, 2, id="stages"),
        pytest.param(SEVERAL, 1, id="several"),
        pytest.param(SEVERAL, 2, id="several-stages"),
    ],
)
def test_layouts(connector: dict[str, Any], num_stages: int, order: str, tmp_path: Path) -> None:
    """Each stage carries its own layers; beside a store, whichever connector has a prompt loads it."""
    engine = Engine(
        "gemma",
        tmp_path,
        is_asynchronous=order == "asynchronous",
        connector=connector,
        num_stages=num_stages,
    )
    try:
        if connector is MEMORY:
            test_tokens(engine)
            return
        # From an empty store, from it, and from the other connector, which is asked first.
        plain = engine.plain()
        stored = engine.generate(LENGTHS, [PREFILL] * len(LENGTHS))
        extra = [{"kv_transfer_params": output.kv_transfer_params} for output in stored]
        outputs = [engine.generate(LENGTHS, extra), engine.plain()]
        assert [tokens(one) for one in outputs] == [tokens(plain)] * 2
        rows = [sum(taken_by(one).encode_rows for one in each) for each in (plain, *outputs)]
        assert rows[1] == rows[0] - sum(map(engine.num_loaded, LENGTHS))
        assert rows[1] < rows[2] < rows[0]
    finally:
        engine.traced.close()


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    MemoryConnector.kept.clear()


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def taken_by(output: Any) -> DiffusionRequestMetrics:
    taken = request_metrics(output.outputs[0])
    assert taken is not None
    return taken


def test_tokens(engine: Engine) -> None:
    """As of one engine, alone and in batches; no row of a prompt runs that need not."""
    plain = engine.plain()
    together = engine.generate(LENGTHS, engine.handed_over())
    assert tokens(together) == tokens(plain)
    alone = engine.generate(LENGTHS[-1:], engine.handed_over(LENGTHS[-1:]))
    assert tokens(alone) == tokens(plain[-1:])
    for length, loaded, computed in zip(LENGTHS, together, plain, strict=True):
        taken, of_one = taken_by(loaded), taken_by(computed)
        assert taken.encode_rows == of_one.encode_rows - engine.num_loaded(length)
        assert taken.denoise_steps_per_canvas == of_one.denoise_steps_per_canvas


def test_failed_load(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is prefilled here after all."""
    plain = engine.plain()
    extra = engine.handed_over()
    monkeypatch.setattr(MemoryConnector, "failing", True)
    failed = engine.generate(LENGTHS, extra)
    assert tokens(failed) == tokens(plain)
    rows = [[taken_by(one).encode_rows for one in outputs] for outputs in (failed, plain)]
    assert rows[0] == rows[1]


def test_offered_keys_and_values(engine: Engine) -> None:
    """Of an answered request a connector is offered what a fresh prefill writes, and no noise."""
    outputs = engine.plain()
    offered = list(MemoryConnector.kept.values())
    assert len(offered) == len(LENGTHS)
    for length, output in zip(LENGTHS, outputs, strict=True):
        text = prompt_of(length) + list(output.outputs[0].token_ids)
        (kept,) = [one for one in offered if one.tokens[:length] == text[:length]]
        assert kept.tokens == text[: len(kept.tokens)]
        assert kept.num_hashed <= len(kept.tokens)
        # All but the last canvas, at least.
        assert len(kept.tokens) > len(text) - 2 * engine.spec.length
        num_final = engine.num_prefilled(len(kept.tokens))
        MemoryConnector.kept.clear()
        params = engine.traced.sampling_params(max_tokens=1, extra_args=PREFILL)
        engine.run([kept.tokens[:num_final]], [params])
        (fresh,) = MemoryConnector.kept.values()
        assert fresh.tokens == kept.tokens[:num_final]
        assert_same(kept, fresh, num_final)


def assert_same(kept: Kept, fresh: Kept, num_tokens: int) -> None:
    for name, (ids, found) in kept.layers.items():
        fresh_ids, written = fresh.layers[name]
        size = found.shape[2]
        # Blocks that left the window were given back.
        live = [i for i, both in enumerate(zip(ids, fresh_ids, strict=False)) if all(both)]
        assert live
        for i in live:
            rows, expected = (blocks[i, :, : num_tokens - i * size] for blocks in (found, written))
            torch.testing.assert_close(
                rows, expected, msg=lambda text, at=(name, i): f"{at}: {text}"
            )
