"""Tests of the inputs that canvas_attention refuses, and of its choice of implementation."""

import logging
import os
import sys

import pytest
import torch

from attention_kernels.canvas_attention import api
from attention_kernels.testing import CanvasBatch, make_canvas_batch
from tests.support.engines.commands import run
from tests.support.oracles.canvas_attention import attend, make_batch


def changed(batch: CanvasBatch, **tensors) -> dict:
    return {**batch.tensors(), "scale": 1.0, **tensors}


BATCH = make_canvas_batch([4, 3], [10, 9], [2, 0])
FP8_BATCH = make_canvas_batch([4], [10], [2], cache_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (changed(BATCH, query=BATCH.query[0]), "query has shape"),
        (changed(BATCH, query=BATCH.query.int()), "query has dtype"),
        (changed(BATCH, query=BATCH.query.half()), "key_cache has dtype"),
        (changed(BATCH, query=BATCH.query[..., :16]), "key_cache has head_dim 32"),
        (changed(BATCH, query=BATCH.query[:, :3]), "query has 3 heads"),
        (changed(BATCH, query=BATCH.query.mT.contiguous().mT), "query has stride"),
        (changed(BATCH, key_cache=BATCH.key_cache[0]), "key_cache has shape"),
        (changed(BATCH, value_cache=BATCH.value_cache[:1]), "value_cache is"),
        (changed(BATCH, seq_lens=BATCH.seq_lens.long()), "seq_lens has dtype"),
        (changed(BATCH, seq_lens=BATCH.seq_lens[None]), "seq_lens has shape"),
        (changed(BATCH, causal_rows=BATCH.causal_rows.bool()), "causal_rows has dtype torch.bool"),
        (changed(BATCH, causal_rows=BATCH.causal_rows[:1]), "causal_rows has shape"),
        (changed(BATCH, causal_rows=BATCH.causal_rows.to("meta")), "causal_rows is on meta"),
        (changed(BATCH, query_start_loc=BATCH.seq_lens), "query_start_loc has shape"),
        (changed(BATCH, block_table=BATCH.block_table[0]), "block_table has shape"),
        (changed(BATCH, block_table=BATCH.block_table[:1]), "block_table has shape"),
        (changed(BATCH, row_spans=BATCH.seq_lens), "row_spans has shape"),
        (changed(BATCH, out=BATCH.query.double()), "out is torch.float64"),
        (changed(BATCH, softcap=-1.0), "softcap=-1.0"),
        (changed(BATCH, softcap=float("nan")), "softcap=nan"),
        (changed(BATCH, left=-2), "window_left=-2"),
        (changed(BATCH, right=4), "window_right=4 has no meaning"),
        (changed(BATCH, anchor="row"), "window_anchor='row'"),
        (changed(BATCH, impl="fast"), "impl='fast'"),
        (changed(BATCH, max_query_len=-1), "max_query_len=-1"),
        (changed(BATCH, key_scale=1.0), "key_scale is given"),
        (changed(FP8_BATCH), "key_scale is missing"),
        (changed(FP8_BATCH, key_scale=1.0), "value_scale is missing"),
        (changed(FP8_BATCH, key_scale=torch.ones(2)), "key_scale is torch.float32"),
    ],
)
def test_canvas_attention_bad_input(arguments, message):
    """A wrong argument is named, with its value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        attend(**arguments)


def test_canvas_attention_triton_refused():
    """The Triton kernels name the inputs that they do not support."""
    with pytest.raises(ValueError, match="query has dtype torch.float64"):
        attend(**make_batch([4], [9], [0], dtype=torch.float64).tensors(), scale=1.0, impl="triton")
    with pytest.raises(ValueError, match="query has head_dim 8"):
        attend(**make_batch([4], [9], [0], head_dim=8).tensors(), scale=1.0, impl="triton")


def test_canvas_attention_triton_needs_a_gpu():
    """Without a GPU and without the interpreter the kernels refuse by name."""
    code = (
        "import attention_kernels.canvas_attention as a, attention_kernels.testing as t\n"
        "b = t.make_canvas_batch([4], [9], [0])\n"
        "try: a.canvas_attention(*b.arguments(a.AttentionOptions(1.0)), impl='triton')\n"
        "except NotImplementedError as e: assert 'TRITON_INTERPRET' in str(e), e\n"
        "else: raise AssertionError('ran')"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run(sys.executable, "-c", code, env=environment)


def test_canvas_attention_auto_logs_once(caplog):
    """The automatic choice is logged once, with its reason."""
    api._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger=api.logger.name):
        attend(**changed(BATCH))
        attend(**changed(BATCH))
    assert [record.message for record in caplog.records] == [
        "canvas attention runs reference: the tensors are on cpu."
    ]


def test_import_needs_torch_alone():
    """Importing the package loads neither Triton nor the engine."""
    code = (
        "import sys, attention_kernels, attention_kernels.testing\n"
        "found = {'triton', 'vllm', 'vllm_diffusion', 'cutlass'} & set(sys.modules)\n"
        "assert not found, found"
    )
    run(sys.executable, "-c", code)
