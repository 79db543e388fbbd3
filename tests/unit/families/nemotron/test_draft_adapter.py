"""The LoRA of drafts acts on their rows on every rank, and on no other rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_diffusion.families.nemotron.draft_lora import TENSOR_NAME, DraftLora
from vllm_diffusion.families.nemotron.model import DraftAdapter

pytestmark = pytest.mark.engine

IN, OUT, RANK, ROWS = 12, 10, 3, 7


class Product:
    """A layer's own method."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class Projection(nn.Module):
    """The part of vLLM's row-parallel layer that the adapter needs, without the sum over ranks."""

    def __init__(self, weight: Tensor, rank: int, ranks: int) -> None:
        super().__init__()
        self.input_size_per_partition = IN // ranks
        self.output_size, self.tp_rank, self.params_dtype = OUT, rank, torch.float32
        self.weight = weight.narrow(1, rank * IN // ranks, IN // ranks)
        self.quant_method: Any = Product()

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x)


def make(folder: Path, rank: int = 0, ranks: int = 1) -> tuple[Projection, DraftAdapter, Tensor]:
    """Return a layer with the LoRA, and the full matrices of both."""
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (
        torch.randn(shape, generator=generator) for shape in ((OUT, IN), (RANK, IN), (OUT, RANK))
    )
    names = (TENSOR_NAME.format(layer=0, half=half) for half in "AB")
    save_file(dict(zip(names, (down, up), strict=True)), folder / "lora.safetensors")
    projection = Projection(weight, rank, ranks)
    layers = [SimpleNamespace(self_attn=SimpleNamespace(o_proj=projection))]
    adapter = DraftAdapter(DraftLora(folder / "lora.safetensors", RANK, 4.0), layers, 16)
    adapter.load()
    return projection, adapter, 4.0 * up @ down


@pytest.mark.parametrize("is_compiled", [False, True])
def test_rows(is_compiled: bool, tmp_path: Path) -> None:
    """Marked rows get the LoRA by its definition, and all other rows keep their bits."""
    projection, adapter, added = make(tmp_path)
    run = projection
    if is_compiled:
        torch._dynamo.reset()
        run = torch.compile(projection, fullgraph=True, backend="eager")
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1))
    plain = Product().apply(projection, x)
    assert torch.equal(run(x), plain)
    # In place, as a captured graph reads it.
    adapter.is_draft_row[2:5] = True
    found, marked = run(x), adapter.is_draft_row[:ROWS]
    assert torch.equal(found[~marked], plain[~marked])
    torch.testing.assert_close(found[marked], (plain + x @ added.T)[marked])


def test_ranks(tmp_path: Path) -> None:
    """The sum over two ranks equals the result of one rank."""
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1))
    whole, adapter, _ = make(tmp_path)
    adapter.is_draft_row.fill_(True)
    parts = []
    for rank in range(2):
        projection, adapter, _ = make(tmp_path, rank, 2)
        adapter.is_draft_row.fill_(True)
        parts.append(projection(x.chunk(2, dim=1)[rank]))
    torch.testing.assert_close(sum(parts), whole(x))
