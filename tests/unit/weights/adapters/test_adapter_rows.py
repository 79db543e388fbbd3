"""The tables for vLLM's kernels have vLLM's own content, and are written without a wait."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vllm.config import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from tests.support.counters.device_waits import DeviceWaits
from vllm_diffusion.weights.adapters.adapter_rows import write_slots

pytestmark = pytest.mark.engine

NUM_SLOTS = 4
MAX_ROWS = 64


def wrapper() -> Any:
    return PunicaWrapperGPU(
        MAX_ROWS, max_batches=8, device="cpu", lora_config=LoRAConfig(max_loras=NUM_SLOTS)
    )


def rows_by_slot(punica: Any, num_rows: int) -> dict[int, list[int]]:
    """Return what a kernel finds for each adapter: its rows among the sorted ones."""
    tables = punica.token_mapping_meta
    mapping, rows, counts, starts, ids, no_lora, num_ids = tables.meta_args(num_rows, False)
    if no_lora:
        return {}
    found = {}
    for i in range(int(num_ids)):
        count = int(counts[i])
        if int(ids[i]) >= 0 and count:
            found[int(ids[i])] = sorted(rows[int(starts[i]) :][:count].tolist())
    assert all(mapping[row] == slot for slot, of_slot in found.items() for row in of_slot)
    return found


def expected(slots: list[int]) -> dict[int, list[int]]:
    return {
        slot: [row for row, one in enumerate(slots) if one == slot] for slot in set(slots) - {-1}
    }


@given(passes=st.lists(st.lists(st.integers(-1, NUM_SLOTS - 1), max_size=MAX_ROWS), min_size=1))
def test_tables(passes: list[list[int]]) -> None:
    """The tables of successive passes have no rows of an earlier pass."""
    ours, stock = wrapper(), wrapper()
    for slots in passes:
        write_slots(
            ours, torch.tensor(slots, dtype=torch.long), is_used=max(slots, default=-1) >= 0
        )
        assert ours.token_lora_indices.tolist() == slots
        if not slots:
            continue
        ids = tuple(slot + 1 for slot in slots)
        layout = list(range(1, NUM_SLOTS + 1))
        stock.update_metadata(LoRAMapping(ids, ids[:1], True), layout, NUM_SLOTS + 1, 320)
        found = rows_by_slot(ours, len(slots))
        assert found == rows_by_slot(stock, len(slots)) == expected(slots)


def test_nothing_waits() -> None:
    """A pass writes its rows on the device without a copy from there."""
    punica = wrapper()
    slots = torch.tensor([1, -1, 0, 0, 3])
    with DeviceWaits() as waits:
        write_slots(punica, slots)
    assert waits.found == []


def test_products_on_the_cpu() -> None:
    """Each row gets the product with its own pair of matrices, whatever rows are around it."""
    from vllm_diffusion.cpu.expert_adapters import RowsByAdapter

    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sizes, rank, into = (6, 4), 3, 5
    a = tuple(randn(NUM_SLOTS, 1, rank, into) for _ in sizes)
    b = tuple(randn(NUM_SLOTS, 1, size, rank) for size in sizes)
    x, y = randn(20, into), randn(20, sum(sizes))
    slots = torch.randint(-1, NUM_SLOTS, (20,), generator=generator)

    def products(rows: Tensor) -> Tensor:
        punica = RowsByAdapter(MAX_ROWS, max_batches=8, device="cpu")
        write_slots(punica, slots[rows])
        out = y[rows].clone()
        punica.add_lora_linear(out, x[rows], a, b, 0.5, sizes)
        return out

    together = products(torch.arange(20))
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(products(torch.tensor([row]))[0], together[row])
        delta = [0.5 * x[row] @ a[i][slot, 0].T @ b[i][slot, 0].T for i in range(len(sizes))]
        right = y[row] + (torch.cat(delta) if slot >= 0 else 0)
        assert torch.allclose(together[row], right, atol=1e-5)
