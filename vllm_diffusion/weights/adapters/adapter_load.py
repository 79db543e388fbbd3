"""Adapters told apart by their load, where vLLM tells them apart by their name."""

from __future__ import annotations

import msgspec
from vllm.lora.request import LoRARequest


class AdapterLoad(LoRARequest):
    """A ``LoRARequest`` that is unequal to another load of the same name.

    The model runner collects a pass's adapters in a set. Where an adapter was unloaded and loaded again
    while requests ran, a pass has two of one name: as one, rows of the other would have no adapter.
    """

    @classmethod
    def of(cls, adapter: LoRARequest) -> AdapterLoad:
        """Make one of vLLM's description."""
        return cls(**msgspec.structs.asdict(adapter))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and _identity(self) == _identity(other)

    def __hash__(self) -> int:
        return hash(_identity(self))


def _identity(adapter: LoRARequest) -> tuple[str, int]:
    return adapter.lora_name, adapter.lora_int_id
