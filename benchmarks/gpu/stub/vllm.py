"""The names of vLLM that the sampler and the canvases import, for a machine that lacks vLLM itself.

The campaign puts this file's folder on the path there, and measures kernels, sampler and graphs all
the same; nothing that serves can run on it. ``tests/unit/benchmarks/test_stub.py`` holds it to what
is imported, and to vLLM.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class LogprobsTensors(NamedTuple):
    """The fields that are read here."""

    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor


def async_tensor_h2d(
    array: np.ndarray, device: torch.device | None = None, *, out: Tensor | None = None
) -> Tensor:
    """An array on the device, on its way from pinned memory where that is a GPU."""
    host = torch.from_numpy(array)
    host = host.pin_memory() if torch.cuda.is_available() else host
    if out is not None:
        return out.copy_(host, non_blocking=True)
    return host.to(device, non_blocking=True)


class _Unused:
    """Named in annotations and type checks, and never made here."""


def _one_rank(*_args: Any, **_kwargs: Any) -> Any:
    raise NotImplementedError("the stub of vLLM knows one rank")


MODULES: dict[str, dict[str, Any]] = {
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.utils.torch_utils": {"async_tensor_h2d": async_tensor_h2d},
    "vllm.v1.outputs": {"LogprobsTensors": LogprobsTensors},
    "vllm.v1.worker.gpu.input_batch": {"InputBatch": _Unused},
    "vllm.v1.worker.gpu.sample.output": {"SamplerOutput": _Unused},
    "vllm.v1.core.sched.output": {"GrammarOutput": _Unused},
    "vllm.model_executor.layers.linear": {"UnquantizedLinearMethod": _Unused},
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "UnquantizedEmbeddingMethod": _Unused,
        "VocabParallelEmbedding": _Unused,
    },
    "vllm.distributed": {
        "get_tensor_model_parallel_world_size": _one_rank,
        "tensor_model_parallel_all_gather": _one_rank,
        "tensor_model_parallel_all_reduce": _one_rank,
    },
}

__path__: list[str] = []
for _path, _names in MODULES.items():
    _parts = _path.split(".")
    for _end in range(2, len(_parts) + 1):
        _name = ".".join(_parts[:_end])
        if _name not in sys.modules:
            _module = ModuleType(_name)
            _module.__path__ = []
            sys.modules[_name] = _module
            setattr(sys.modules[".".join(_parts[: _end - 1])], _parts[_end - 1], _module)
    vars(sys.modules[_path]).update(_names)
