"""What vLLM runs at a start on a GPU, and the CPU platform leaves out, runs with ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine import TracedEngine
from tests.support.families.cases import CASES
from vllm_diffusion.cli.checkpoint import shipped_checkpoint

pytestmark = pytest.mark.engine

LINEAR_SPEC = {"additional_config": {"diffusion": {"rule": "linear_spec"}}}
# Every family, and every rule that it has.
SERVED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "diffusion-gemma": (None, {}),
    "nemotron-linear-spec": ("nemotron", LINEAR_SPEC),
    **{
        name: (name, case.options)
        for name, case in CASES.items()
        if name not in ("sdar-block-32", "sdar-moe")
    },
}


# One for each way in which passes begin; the others start on the null GPU, which runs the same.
OFTEN = ("diffusion-gemma", "nemotron-linear-spec", "sdar")


def cases() -> list[Any]:
    """Each in both orders; a few in the asynchronous one where the machine is in a hurry."""
    return [
        pytest.param(
            name,
            is_async,
            id=f"{name}-{'async' if is_async else 'sync'}",
            marks=() if is_async and name in OFTEN else pytest.mark.slow,
        )
        for name, (family, _) in SERVED.items()
        for is_async in (True, False)
        if not is_async or family is None or CASES[family].is_asynchronous
    ]


@contextmanager
def rows_of_passes(sampler: Any) -> Iterator[list[int]]:
    """How many rows the sampler was given in each pass."""
    sampled: list[int] = []
    call = type(sampler).__call__

    def recording(self: Any, rows: Any, input_batch: Any, message: Any = None) -> Any:
        sampled.append(len(rows))
        return call(self, rows, input_batch, message)

    type(sampler).__call__ = recording
    try:
        yield sampled
    finally:
        type(sampler).__call__ = call


def checkpoint_of(family: str | None, folder: Path) -> Path:
    return shipped_checkpoint() if family is None else CASES[family].make().save(folder)


@pytest.mark.parametrize(("name", "asynchronous"), cases())
@pytest.mark.timeout(300)
def test_warm_up(name, asynchronous, tmp_path):
    """Its passes hold every sampling setting, prefill beside decodes, and dummies; tokens stay."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

    family, options = SERVED[name]
    with TracedEngine(
        checkpoint_of(family, tmp_path),
        async_scheduling=asynchronous,
        # It writes to whichever blocks it likes.
        enable_prefix_caching=False,
        max_logprobs=10,
        max_model_len=256,
        **options,
    ) as engine:
        canvas, runner = engine.slots.canvas_length, engine.runner
        rng = np.random.default_rng(0)
        prompts = [rng.integers(20, 50, n).tolist() for n in (5, 40)]

        def tokens() -> list[list[int]]:
            answers = engine.generate(prompts, seeds=[1, 2], max_tokens=2 * canvas, top_p=0.9)
            return [list(answer.token_ids) for answer in answers]

        expected = tokens()
        # The scheduler tells the runner with its next pass; the warm-up wants every slot.
        for request_id in list(runner.req_states.req_id_to_index):
            runner._remove_request(request_id)
        core = engine.llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker

        with rows_of_passes(runner.sampler) as sampled, runner.short_drafts():
            for _ in range(2):
                warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
            assert run_mixed_prefill_decode_warmup(
                runner, worker.execute_model, worker.sample_tokens, 64
            )
        layout = engine.slots.spec.layout
        # Prompts alone, whose last rows begin a canvas in seeded families; canvases of all and of some.
        assert min(sampled) == (1 if layout.starts_from_commit else 0)
        # Its prompts fill the canvases of whole sequences, so that no row is left to sample.
        most = 0 if layout.holds_sequence else engine.slots.num_slots * canvas
        assert max(sampled) == most

        with torch.inference_mode():
            check_dummies(runner, canvas)
        assert tokens() == expected


def check_dummies(runner: Any, canvas: int) -> None:
    """Passes without requests, by which vLLM measures memory and captures graphs."""
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

    for num_tokens, uniform in ((4 * canvas, False), (97, False), (4 * canvas, True)):
        hidden, rows = runner._dummy_run(num_tokens, uniform_decode=uniform)
        assert len(hidden) == num_tokens
        assert len(rows) == min(num_tokens // canvas if uniform else num_tokens, 4)
    for full in (True, False):
        state = prepare_inputs_to_capture(
            4,
            4 * canvas,
            runner.model_state,
            runner.input_buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            full_cudagraph=full,
        )
        for metadata in state.attn_metadata.values():
            causal = metadata.sequences.causal_rows
            # At an address that a replay reads anew.
            assert causal.data_ptr() == runner.model_state.pass_rows.causal.num_rows.data_ptr()
            assert metadata.sequences.max_seq_len == (runner.max_model_len if full else canvas)
