"""Seeds of requests that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's default of --seed; an operator who sets it cannot be distinguished from one who does not.
UNSET = 0


def source_of_seeds(vllm_config: VllmConfig) -> np.random.Generator:
    """Return the generator of the seeds of an engine's requests that have none.

    By default it differs in every engine and after every start, so that equal requests get
    different answers. A server's own ``--seed`` makes it repeat from start to start, and then the
    index of a data-parallel engine makes it differ from that of the others, as in vLLM's
    ``set_random_seed``. Engines of an external launcher each schedule the same requests, one for
    each rank of one model, so theirs are alike.
    """
    seed, parallel = vllm_config.model_config.seed, vllm_config.parallel_config
    if seed == UNSET and parallel.distributed_executor_backend != "external_launcher":
        return np.random.default_rng()
    return np.random.default_rng((seed, parallel.data_parallel_index))
