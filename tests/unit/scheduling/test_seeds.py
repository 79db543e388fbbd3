"""Requests without a seed never repeat each other, unless the operator gave the server a seed."""

import pytest

from tests.support.engines.vllm_configs import vllm_config
from vllm_diffusion.scheduling.canvas_scheduler import source_of_seeds


def drawn(seed: int, engine: int = 0, backend: str | None = None) -> list[int]:
    """Return the seeds of an engine's first requests after a start."""
    config = vllm_config(seed=seed)
    config.parallel_config.data_parallel_index = engine
    config.parallel_config.distributed_executor_backend = backend
    return source_of_seeds(config).integers(2**63, size=8).tolist()


def test_unset():
    """By default every start of every engine draws other seeds."""
    starts = [drawn(0), drawn(0), drawn(0, engine=1)]
    assert len({seed for seeds in starts for seed in seeds}) == 24


@pytest.mark.parametrize("backend", [None, "mp"])
def test_set(backend):
    """With a server's seed a start repeats the previous one's seeds, and engines differ."""
    assert drawn(7, 0, backend) == drawn(7, 0, backend)
    assert not set(drawn(7, 0, backend)) & set(drawn(7, 1, backend))


def test_external_launcher():
    """Ranks of one model that each schedule for themselves draw the same seeds."""
    assert drawn(0, 0, "external_launcher") == drawn(0, 0, "external_launcher")
