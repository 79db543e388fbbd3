"""vLLM's offloading to a CPU's memory, with PyTorch instead of the copies that need a GPU.

vLLM itself decides what is stored and when, and what is found again.
"""

from typing import Any

from torch import Tensor
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

# In ``kv_transfer_config``.
CONNECTOR: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TorchOffloadingSpec",
        "spec_module_path": __name__,
        "cpu_bytes_to_use": 64 * 1024**2,
        # Answers too.
        "offload_prompt_only": False,
    },
}


class TorchOffloadingSpec(CPUOffloadingSpec):
    """Chunks of one block each."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return _TorchWorker(kv_caches)


class _TorchWorker(OffloadingWorker):
    def __init__(self, kv_caches: Any) -> None:
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        # By chunk, what each of its group's layers has.
        self._chunks: dict[int, list[Tensor]] = {}
        self._done: list[TransferResult] = []

    def _pairs(self, blocks: Any, chunks: Any) -> Any:
        """Return (group, block, chunk) of each copy."""
        groups = [i for i, size in enumerate(blocks.group_sizes) for _ in range(size)]
        return zip(groups, blocks.block_ids.tolist(), chunks.chunk_ids.tolist(), strict=True)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for group, block, chunk in self._pairs(src_spec, dst_spec):
            rows = [self._tensors[ref.tensor_idx][block] for ref in self._refs[group]]
            self._chunks[chunk] = [row.clone() for row in rows]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        for group, block, chunk in self._pairs(dst_spec, src_spec):
            for ref, row in zip(self._refs[group], self._chunks[chunk], strict=True):
                self._tensors[ref.tensor_idx][block] = row
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once, as every copy is made when it is submitted."""
