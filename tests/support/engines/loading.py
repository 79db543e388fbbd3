"""Loads a checkpoint's folder by vLLM's own loader in this process, without an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.engines.generate import run_aside, work_aside
from tests.support.engines.vllm_configs import configure


@contextmanager
def one_rank() -> Iterator[None]:
    """Set up the process groups and kernels that vLLM's layers need."""
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


def load_in_stock(*folders: Path) -> list[str | list[str]]:
    """Load checkpoints with vLLM's own classes, in a process that never hears of ours.

    Returns:
        For each what its loading raised, or the parameters that differ from the first one's.
    """
    found, _ = run_aside(__name__, [*map(str, folders)], VLLM_PLUGINS="vllm_diffusion_cpu")
    return list(found)


def _compare(folders: list[Path]) -> Iterator[str | list[str]]:
    good: dict[str, torch.Tensor] = {}
    for folder in folders:
        try:
            found = dict(load(folder).named_parameters())
        except (
            AssertionError,
            AttributeError,
            IndexError,
            KeyError,
            RuntimeError,
            ValueError,
        ) as error:
            yield f"{type(error).__name__}: {error}"
            continue
        good = good or found
        assert good.keys() == found.keys()
        # Bytes, since NaN is in what nothing was loaded into.
        yield [
            name
            for name, value in good.items()
            if not torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))
        ]


if __name__ == "__main__":
    with one_rank():
        work_aside(lambda folders: [*_compare([*map(Path, folders)])])
