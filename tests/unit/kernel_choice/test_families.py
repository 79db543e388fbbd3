"""Every family has a step that can be checked, and kinds of layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from tests.support.families.cases import CASES, checkpoint_of
from tests.support.graphs import emulated_capture
from vllm_diffusion.kernel_choice.cases import Served, few_tiles
from vllm_diffusion.kernel_choice.graphs import check_step_graph
from vllm_diffusion.startup.kernel_choices import kernel_choices


@pytest.mark.parametrize("family", CASES)
def test_the_step_of_a_family(family, tmp_path):
    """Its canvases and its rule run without an engine, and give the same bits replayed."""
    folder, options = checkpoint_of(family, tmp_path)
    config = EngineArgs(
        str(folder), max_model_len=256, max_num_seqs=3, **options
    ).create_engine_config()
    served = Served.of(config, kernel_choices(config))
    assert served.step.slots == 3
    assert served.step.vocab == few_tiles(config.model_config.get_vocab_size())
    assert served.kinds
    assert all(kind.head_dim == config.model_config.get_head_size() for kind in served.kinds[-1:])
    step = replace(served.step, dtype="float32")
    assert check_step_graph(step, torch.device("cpu"), emulated_capture).difference == 0
