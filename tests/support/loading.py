"""A checkpoint's folder loaded by vLLM's own loader in this process, without an engine around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from tests.support.vllm_configs import configure


@contextmanager
def one_rank() -> Iterator[None]:
    """The process groups and kernels that vLLM's layers ask for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_open_port

    # As a worker does before it makes a model.
    current_platform.register_triton_kernel_overrides()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            1, 0, f"tcp://127.0.0.1:{get_open_port()}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel()
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


def load(folder: Path, **options: Any) -> nn.Module:
    """The model of a checkpoint with its weights, before kernels rewrite them.

    Args:
        folder: The checkpoint.
        options: Arguments of ``EngineArgs``; ``max_model_len`` is 256 if not given.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = configure(folder, **options)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model
