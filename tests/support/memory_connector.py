"""A KV connector within one engine: what finished requests leave is kept, and prompts are loaded from it.

It speaks as NIXL's do: a request with ``do_remote_decode`` is answered with the parameters with which
another one loads its prompt, ``do_remote_prefill``. Every other finished request is kept as well, for
tests that look at it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class Kept:
    """What a finished request left.

    Attributes:
        tokens: Those whose keys and values a connector is offered.
        num_hashed: How many of them are in blocks with a hash.
        layers: Of each layer of a worker the ids of its blocks, 0 for one that no window reaches, and
            [num_blocks, num_kv_heads, block_size, 2 * head_size]. A worker in a process of its own has
            nothing of the rest.
    """

    tokens: list[int] = field(default_factory=list)
    num_hashed: int = 0
    layers: dict[str, tuple[list[int], Tensor]] = field(default_factory=dict)


# Ids of blocks, by group of layers: each stage has layers of its own in them.
_Blocks = tuple[list[int], ...]


@dataclass
class _Transfers(KVConnectorMetadata):
    """Requests that are kept, and those that are loaded, with what: each with its blocks."""

    saved: dict[str, _Blocks]
    loaded: dict[str, tuple[str, _Blocks]]


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves of it. Each worker keeps what its own layers have."""

    kept: ClassVar[dict[str, Kept]] = {}
    # Requests whose load is reported as failed.
    failing: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transfers = _Transfers({}, {})
        self._results = KVConnectorTransferResults()

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        count = request.num_prompt_tokens - num_computed_tokens
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            params = request.kv_transfer_params
            params["do_remote_prefill"] = False
            self._transfers.loaded[request.request_id] = (
                params["remote_request_id"],
                blocks.get_block_ids(),
            )

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        params = request.kv_transfer_params or {}
        tokens = list(request.all_token_ids[: request.num_computed_tokens])
        num_hashed = len(request.block_hashes) * self._vllm_config.cache_config.block_size
        self.kept[request.request_id] = Kept(tokens, num_hashed)
        self._transfers.saved[request.request_id] = block_ids
        hands_over = params.get("do_remote_decode")
        return True, (
            {
                "do_remote_prefill": True,
                "remote_request_id": request.request_id,
                "remote_num_tokens": len(tokens),
            }
            if hands_over
            else None
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        transfers, self._transfers = self._transfers, _Transfers({}, {})
        return transfers

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        transfers = self._get_connector_metadata()
        for request_id, block_ids in transfers.saved.items():
            kept = self.kept.setdefault(request_id, Kept())
            for name, ids in self._by_layer(block_ids).items():
                kept.layers[name] = ids, self._caches[name][ids].clone()
            self._results.finished_sending.add(request_id)
        for request_id, (key, block_ids) in transfers.loaded.items():
            self._results.finished_recving.add(request_id)
            if self.failing:
                self._results.failed_recving.add(request_id)
                continue
            kept = self.kept[key]
            for name, into in self._by_layer(block_ids).items():
                of, rows = kept.layers[name]
                assert len(into) == len(of), "the two requests have other blocks"
                live = [i for i, block in enumerate(of) if block > 0]
                self._caches[name][[into[i] for i in live]] = rows[live]

    def _by_layer(self, block_ids: _Blocks) -> dict[str, list[int]]:
        groups = self._kv_cache_config.kv_cache_groups
        return {
            name: ids
            for group, ids in zip(groups, block_ids, strict=True)
            for name in group.layer_names
        }

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole prompts are loaded at once."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Requests are saved when they have ended."""

    def wait_for_save(self) -> None:
        """They are saved at once."""
