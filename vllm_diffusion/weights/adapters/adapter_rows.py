"""Adapters of the rows of a pass: distinguished by their load, and written where vLLM's LoRA
products read them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor
from vllm.lora.request import LoRARequest


class AdapterLoad(LoRARequest):
    """A ``LoRARequest`` that is unequal to another load of the same name.

    The model runner collects a pass's adapters in a set. Where an adapter was unloaded and loaded
    again while requests ran, a pass has two of one name: as one, rows of the other would have no
    adapter.
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


def write_slots(punica: Any, slots: Tensor, *, is_used: bool = True) -> None:
    """Write each row's slot into ``punica``, without waiting for the device.

    vLLM's own method asks the device for the number of adapters. Here the kernels find all of them
    in their tables, most with no rows, so that a graph may hold this call and the kernels.

    Args:
        punica: vLLM's wrapper of its products, that of GPUs or ours for CPUs.
        slots: [num_rows], int64, -1 for a row without an adapter.
        is_used: True if any row may have an adapter; otherwise the kernels are not launched.
    """
    num_rows = slots.shape[0]
    punica._token_lora_indices[:num_rows] = slots
    punica.indices_len[0] = num_rows
    tables = getattr(punica, "token_mapping_meta", None)
    if tables is None:
        return
    tables.no_lora_flag_cpu.fill_(not is_used)
    if not is_used:
        return
    num_slots = tables.active_lora_ids.shape[0] - 1
    tables.num_active_loras_cpu.fill_(num_slots + 1)
    ids = torch.arange(-1, num_slots, dtype=torch.int32, device=slots.device)
    counts = (slots[:, None] == ids).sum(0)
    tables.active_lora_ids.copy_(ids)
    tables.num_tokens_per_lora.copy_(counts)
    tables.lora_token_start_loc[1:].copy_(counts.cumsum(0))
    tables.token_lora_mapping[:num_rows].copy_(slots)
    tables.token_indices_sorted_by_lora_ids[:num_rows].copy_(slots.argsort(stable=True))
