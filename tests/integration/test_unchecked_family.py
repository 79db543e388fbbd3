"""A class of canvases whose family has no start-up checks is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.families import makers as tiny
from vllm_diffusion.runner.model_state import BlockDiffusionModelState

pytestmark = pytest.mark.engine


def test_family_without_start_up_checks(tmp_path: Path) -> None:
    """A family without start-up checks, which vLLM's scheduler would run wrongly, is refused."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class MaskedLlamaForTests(LlamaForCausalLM):
        @staticmethod
        def get_model_state_cls() -> type:
            return BlockDiffusionModelState

    ModelRegistry.register_model("MaskedLlamaForTests", MaskedLlamaForTests)
    family = tiny.stable_diffcoder
    architecture = {"architectures": ["MaskedLlamaForTests"]}
    family = replace(family, config=family.config | architecture, block_length_key=None)
    with pytest.raises(ValueError, match="MaskedLlamaForTests has no start-up checks"):
        LLM(
            str(family().save(tmp_path)),
            diffusion_config={"canvas_length": 8},
            async_scheduling=False,
            max_model_len=128,
            enforce_eager=True,
            kv_cache_memory_bytes=16 * 1024**2,
        )
    cleanup_dist_env_and_memory()
