"""The LoRA of drafts acts on their rows on every rank, and on no other rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_diffusion.runner.adapted_drafts import DraftAdapter
from vllm_diffusion.startup.draft_lora import DraftLora

pytestmark = pytest.mark.engine

IN, RANK, ROWS, SCALE = 12, 3, 7, 4.0
# Outputs of each published module by the layer that vLLM makes of them; one head of keys for two
# ranks.
LAYERS = {"qkv_proj": {"q_proj": 8, "k_proj": 4, "v_proj": 4}, "o_proj": {"o_proj": 10}}
SHARED = ("k_proj", "v_proj")
# Not adapted: a part of a layer that is.
LEFT_OUT = "v_proj"


class Product:
    """A layer's own method."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class Layer(nn.Module):
    """What the adapter needs of vLLM's layers, without the sum or the exchange over ranks."""

    def __init__(self, weight: Tensor, sizes: list[int], rank: int, ranks: int) -> None:
        super().__init__()
        self.input_size_per_partition, self.output_partition_sizes = weight.shape[1], sizes
        self.tp_rank, self.tp_size, self.params_dtype = rank, ranks, torch.float32
        self.weight = weight
        self.quant_method: Any = Product()

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x)


class Model(nn.Module):
    """A layer of each kind: one whose outputs ranks share, and one whose inputs they do."""

    packed_modules_mapping = {"qkv_proj": list(LAYERS["qkv_proj"])}

    def __init__(self, weights: dict[str, Tensor], rank: int, ranks: int) -> None:
        super().__init__()
        self.attn = nn.Module()

        def share(name: str) -> Tensor:
            whole = weights[name]
            if name == "o_proj":
                return whole.chunk(ranks, dim=1)[rank]
            return whole if name in SHARED else whole.chunk(ranks)[rank]

        for layer, parts in LAYERS.items():
            shares = [share(part) for part in parts]
            made = Layer(torch.cat(shares), [len(each) for each in shares], rank, ranks)
            setattr(self.attn, layer, made)


def as_loaded(name: str, rows: Tensor) -> Tensor:
    """Return rows in the order in which this model has those of the layer."""
    return rows.flip(0) if name.endswith("q_proj") else rows


def make(
    folder: Path, rank: int = 0, ranks: int = 1
) -> tuple[Model, DraftAdapter, dict[str, Tensor]]:
    """Return a model with the LoRA, and what that adds to each published module's matrix."""
    generator = torch.Generator().manual_seed(0)
    outputs = {name: size for parts in LAYERS.values() for name, size in parts.items()}
    weights, tensors, added = {}, {}, {}
    for name, size in outputs.items():
        weights[name], down, up = (
            torch.randn(shape, generator=generator)
            for shape in ((size, IN), (RANK, IN), (size, RANK))
        )
        added[name] = SCALE * as_loaded(name, up) @ down * (name != LEFT_OUT)
        if name != LEFT_OUT:
            tensors[f"base_model.model.attn.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.attn.{name}.lora_B.weight"] = up
    save_file(tensors, folder / "lora.safetensors")
    model = Model(weights, rank, ranks)
    names = tuple(f"attn.{name}" for name in outputs if name != LEFT_OUT)
    adapter = DraftAdapter(DraftLora(folder / "lora.safetensors", names, RANK, SCALE), model, 16)
    adapter.load(as_loaded)
    return model, adapter, added


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_rows(name: str, is_compiled: bool, tmp_path: Path) -> None:
    """Marked rows get the LoRA by its definition, and all other rows keep their bits."""
    model, adapter, of_parts = make(tmp_path)
    layer = model.attn.get_submodule(name)
    added = torch.cat([of_parts[part] for part in LAYERS[name]])
    run = layer
    if is_compiled:
        torch._dynamo.reset()
        run = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1))
    plain = Product().apply(layer, x)
    assert torch.equal(run(x), plain)
    # In place, as a captured graph reads it.
    adapter.is_draft_row[2:5] = True
    found, marked = run(x), adapter.is_draft_row[:ROWS]
    assert torch.equal(found[~marked], plain[~marked])
    torch.testing.assert_close(found[marked], (plain + x @ added.T)[marked])


def test_ranks(tmp_path: Path) -> None:
    """What two ranks give together is what one gives: a sum of shares of the input, or shares of
    the output, of which heads of keys and values may be the same.
    """
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1))
    outputs = []
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        model, adapter, _ = make(tmp_path, rank, ranks)
        adapter.is_draft_row.fill_(True)
        part = x.chunk(ranks, dim=1)[rank]
        outputs.append((model.attn.qkv_proj(x), model.attn.o_proj(part)))
    (whole, whole_sum), (first, first_sum), (second, second_sum) = outputs
    torch.testing.assert_close(first_sum + second_sum, whole_sum)
    torch.testing.assert_close(torch.cat([first[:, :4], second[:, :4]], dim=1), whole[:, :8])
    torch.testing.assert_close(first[:, 4:], whole[:, 8:])
    torch.testing.assert_close(second[:, 4:], whole[:, 8:])


def test_unknown_module(tmp_path: Path) -> None:
    """An adapter of a module that the model has not is refused by name."""
    _, adapter, _ = make(tmp_path)
    model = Model({name: torch.zeros(8, IN) for parts in LAYERS.values() for name in parts}, 0, 1)
    lora = DraftLora(tmp_path / "lora.safetensors", ("attn.router",), RANK, SCALE)
    with pytest.raises(ValueError, match="router"):
        DraftAdapter(lora, model, 16)
