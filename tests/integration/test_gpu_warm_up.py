"""What vLLM runs at a start on a GPU, and the CPU platform leaves out, runs with ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.engine import TracedEngine
from vllm_diffusion.cli.checkpoint import shipped_checkpoint

pytestmark = pytest.mark.engine

CANVAS = 32


@pytest.mark.parametrize(
    "asynchronous",
    [pytest.param(True, id="asynchronous"), pytest.param(False, marks=pytest.mark.slow, id="sync")],
)
@pytest.mark.timeout(300)
def test_warm_up(asynchronous):
    """Its passes hold every sampling setting, prefill beside decodes, and dummies; tokens stay."""
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

    engine = TracedEngine(
        shipped_checkpoint(),
        async_scheduling=asynchronous,
        # It writes to whichever blocks it likes.
        enable_prefix_caching=False,
        max_logprobs=10,
    )
    try:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(20, 276, n).tolist() for n in (5, 40)]

        def tokens() -> list[list[int]]:
            answers = engine.generate(prompts, seeds=[1, 2], max_tokens=2 * CANVAS, top_p=0.9)
            return [list(answer.token_ids) for answer in answers]

        expected = tokens()
        runner = engine.runner
        # The scheduler tells the runner with its next pass; the warm-up wants every slot.
        for request_id in list(runner.req_states.req_id_to_index):
            runner._remove_request(request_id)
        core = engine.llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker

        sampled = []
        call = type(runner.sampler).__call__

        def recording(self, rows, input_batch, message=None):
            sampled.append(len(rows))
            return call(self, rows, input_batch, message)

        type(runner.sampler).__call__ = recording
        try:
            for _ in range(2):
                warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
            assert run_mixed_prefill_decode_warmup(
                runner, worker.execute_model, worker.sample_tokens, 64
            )
        finally:
            type(runner.sampler).__call__ = call
        # Prompts alone, and canvases of all requests and of some.
        assert 0 in sampled
        assert max(sampled) == engine.slots.num_slots * CANVAS

        with torch.inference_mode():
            for num_tokens, uniform in ((4 * CANVAS, False), (97, False), (4 * CANVAS, True)):
                hidden, rows = runner._dummy_run(num_tokens, uniform_decode=uniform)
                assert len(hidden) == num_tokens
                assert len(rows) == min(num_tokens // CANVAS if uniform else num_tokens, 4)
            for full in (True, False):
                state = prepare_inputs_to_capture(
                    4,
                    4 * CANVAS,
                    runner.model_state,
                    runner.input_buffers,
                    runner.block_tables,
                    runner.attn_groups,
                    runner.kv_cache_config,
                    full_cudagraph=full,
                )
                for metadata in state.attn_metadata.values():
                    causal = metadata.causal_rows
                    # At an address that a replay reads anew.
                    assert causal.data_ptr() == runner.model_state.pass_rows.causal_rows.data_ptr()
                    assert metadata.max_seq_len == (runner.max_model_len if full else CANVAS)
        assert tokens() == expected
    finally:
        engine.close()
