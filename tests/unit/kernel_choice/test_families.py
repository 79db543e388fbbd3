"""Every family has kernels that can be checked."""

from __future__ import annotations

import pytest

from tests.support.families.cases import CASES, checkpoint_of
from tests.support.vllm_configs import configure
from vllm_diffusion.kernel_choice.cases import Served, few_tiles
from vllm_diffusion.startup.plan import plan_of


@pytest.mark.parametrize("family", CASES)
def test_the_kernels_of_a_family(family, tmp_path):
    """Layers and vocabulary are those of the checkpoint."""
    folder, options = checkpoint_of(family, tmp_path)
    config = configure(folder, max_num_seqs=3, **options)
    served = Served.of(config, plan_of(config).kernels)
    assert served.vocab == few_tiles(config.model_config.get_vocab_size())
    assert served.kinds
    assert all(kind.head_dim == config.model_config.get_head_size() for kind in served.kinds[-1:])
