"""Trainer's side of the weight transfer ``safetensors``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

# Default size of a file in bytes.
_FILE_BYTES = 2**30


@dataclass
class SafetensorsTrainerInitInfo(TrainerInitInfo):
    """Settings of a trainer that sends weights.

    Attributes:
        folder: Folder of the files while they are sent, which the server sees under the same name,
            in memory for example (``/dev/shm``).
        max_file_bytes: Size at which a file ends, with the tensor that reaches it; 1 sends each
            tensor by itself.
        rank: Rank of the trainer's process; rank 0 sends.
    """

    backend: ClassVar[str] = "safetensors"
    folder: str
    max_file_bytes: int = _FILE_BYTES


class SafetensorsTrainerEngine(TrainerWeightTransferEngine[SafetensorsTrainerInitInfo]):
    """Trainer engine that writes files and sends their paths to the server."""

    init_info_cls = SafetensorsTrainerInitInfo

    def __init__(
        self,
        init_info: SafetensorsTrainerInitInfo,
        client: VLLMWeightSyncClient,
        source: WeightSource,
    ) -> None:
        super().__init__(
            client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank
        )
        self._init_info = init_info
        self._source = source

    @classmethod
    def trainer_init(
        cls,
        init_info: SafetensorsTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Make the engine as vLLM makes its own.

        Args:
            init_info: Settings of the transfer.
            client: Client of the server.
            source: Tensors to send, under the names of a checkpoint.

        Raises:
            ValueError: Without a source.
        """
        if source is None:
            raise ValueError("The weight transfer safetensors sends whole tensors: give a source.")
        engine = cls(init_info, client, source)
        if engine.is_sender:
            client.init_weight_transfer_engine({})
        return engine

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send every tensor of the source, and let the server load them.

        Args:
            weight_version: Name of these weights in the server from then on.
        """
        if not self.is_sender:
            # Every rank takes part in gathering a tensor's pieces.
            for _ in self._source.iter_full():
                pass
            return
        with tempfile.TemporaryDirectory(dir=self._init_info.folder) as folder:
            self.client.start_weight_update()
            for index, tensors in enumerate(self._files()):
                path = Path(folder) / f"{index:05}.safetensors"
                save_file(tensors, path)
                self.client.update_weights({"path": str(path)})
            self.client.finish_weight_update(weight_version)

    def _files(self) -> Iterator[dict[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        num_bytes = 0
        for name, tensor in self._source.iter_full():
            # A copy of its own: a trainer's tensors may share memory, which no file can hold.
            tensors[name] = tensor.detach().cpu().clone().contiguous()
            num_bytes += tensor.nbytes
            if num_bytes >= self._init_info.max_file_bytes:
                yield tensors
                tensors, num_bytes = {}, 0
        if tensors:
            yield tensors
