"""Connector for vLLM's extraction of hidden states without CUDA streams or pinned memory."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")


class _Done:
    """Event of a copy that is complete."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Connector that writes a request's states at once, since the cache is in host memory."""

    def _submit_async_write(self, pending: Any) -> None:
        """Write ``token_ids`` [T] and ``hidden_states`` [T, states, hidden_size] to the request's
        file.

        A failed write is logged, as in vLLM: the reader finds no file.
        """
        if not self._is_tp_rank_zero:
            return
        # [blocks, states, block_size, hidden_size]
        blocks = self._kv_cache[pending.block_ids]
        states = blocks.transpose(1, 2).flatten(0, 1)[: len(pending.token_ids)]
        tensors = {
            "hidden_states": states.contiguous(),
            "token_ids": pending.token_ids.to(torch.int64),
        }
        lock = self._lock_fds.pop(pending.req_id, None)
        try:
            Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, pending.filename)
        except (OSError, SafetensorError) as error:
            logger.error("Hidden states of request %s are lost: %s", pending.req_id, error)
        finally:
            if lock is not None:
                os.close(lock)
        self._req_copy_events[pending.req_id] = _Done()
