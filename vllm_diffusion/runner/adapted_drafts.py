"""Models that draft for themselves with a LoRA (rule ``linear_spec``).

Passes hold rows of drafts next to rows that are verified, and rows of prompts, so the LoRA is added
row by row: to rows of drafts alone, and to the bit nothing else changes. With tensor parallelism a
rank adds what its part of a layer gives, before ranks are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.states import RequestState

from vllm_diffusion.canvas.slots import Phase
from vllm_diffusion.runner.masked_model import MaskedModel
from vllm_diffusion.runner.model_state import BlockDiffusionModelState
from vllm_diffusion.startup.draft_lora import DraftLora, verifies_drafts


class _AdaptedLinearMethod(LinearMethodBase):
    """A layer's own method, and in rows of drafts the LoRA on top."""

    def __init__(self, base: LinearMethodBase, adapter: DraftAdapter, sizes: list[int]) -> None:
        """Wrap a method.

        Args:
            base: The layer's own.
            adapter: The LoRA.
            sizes: Outputs of each of the published modules that the layer is.
        """
        self.base = base
        self.adapter = adapter
        self.sizes = sizes

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.base.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.base.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = self.base.apply(layer, x, bias)
        if not self.adapter.acts:
            return output
        low = nn.functional.linear(x, layer.draft_lora_a).chunk(len(self.sizes), dim=-1)
        ups = layer.draft_lora_b.split(self.sizes)
        pairs = zip(low, ups, strict=True)
        added = torch.cat([nn.functional.linear(half, up) for half, up in pairs], dim=-1)
        is_draft = layer.is_draft_row[: x.shape[0], None]
        return torch.where(is_draft, output + self.adapter.scale * added, output)


class DraftAdapter:
    """The LoRA on a model's layers.

    Attributes:
        is_draft_row: [max_num_tokens], bool: rows of the pass that it acts on, at an address that
            never changes.
        acts: False in a pass without such rows, where no graph is captured and looking costs
            nothing: on a CPU.
        scale: Factor of the products.
    """

    def __init__(self, lora: DraftLora, model: nn.Module, max_num_tokens: int) -> None:
        """Adapt each layer; the added product is zero until :meth:`load`.

        Args:
            lora: Adapter to add.
            model: The model, of which ``packed_modules_mapping`` tells what a layer is made of and
                ``hf_to_vllm_mapper`` what it is called.
            max_num_tokens: Largest number of tokens of a pass.
        """
        self._lora = lora
        self.acts, self.scale = True, lora.scale
        self.is_draft_row = torch.zeros(max_num_tokens, dtype=torch.bool)
        renaming: Any = getattr(model, "hf_to_vllm_mapper", WeightsMapper()).get_rename_mapper()
        packed: Any = getattr(model, "packed_modules_mapping", {})
        names = {renaming.map_name(name): name for name in lora.modules}
        # Each adapted layer, with the published names of its parts; ``None`` for one left as it is.
        self._layers: list[tuple[Any, list[str | None]]] = []
        for name, layer in model.named_modules():
            stem, _, last = name.rpartition(".")
            parts = [names.pop(f"{stem}.{part}", None) for part in packed.get(last, [last])]
            if any(parts):
                self._adapt(layer, len(parts))
                self._layers.append((layer, parts))
        if names:
            raise ValueError(f"{lora.file} adapts {min(names)}, which this model has not.")

    def _adapt(self, layer: Any, num_parts: int) -> None:
        rank, sizes = self._lora.rank, layer.output_partition_sizes
        down = torch.zeros(rank * num_parts, layer.input_size_per_partition)
        up = torch.zeros(sum(sizes), rank)
        for name, buffer in (
            ("draft_lora_a", down.to(layer.params_dtype)),
            ("draft_lora_b", up.to(layer.params_dtype)),
            ("is_draft_row", self.is_draft_row),
        ):
            layer.register_buffer(name, buffer, persistent=False)
        layer.quant_method = _AdaptedLinearMethod(layer.quant_method, self, sizes)

    def load(self, loaded_rows: Callable[[str, Tensor], Tensor]) -> None:
        """Copy this rank's part from the file.

        Args:
            loaded_rows: :meth:`AdaptedDraftModel.loaded_rows` of the model.
        """
        from safetensors.torch import load_file

        tensors = load_file(self._lora.file)
        tensors = {name.removeprefix("base_model.model."): each for name, each in tensors.items()}
        for layer, parts in self._layers:
            sizes = layer.output_partition_sizes
            halves = layer.draft_lora_a.chunk(len(parts)), layer.draft_lora_b.split(sizes)
            for name, down, up in zip(parts, *halves, strict=True):
                if name is not None:
                    _copy_part(layer, tensors[f"{name}.lora_A.weight"], down, dim=1)
                    rows = loaded_rows(name, tensors[f"{name}.lora_B.weight"])
                    _copy_part(layer, rows, up, dim=0)


def _copy_part(layer: Any, whole: Tensor, part: Tensor, dim: int) -> None:
    """Copy what a rank has of a matrix: all of it, its share, or one that it shares with others."""
    size = part.shape[dim]
    first = layer.tp_rank * (whole.shape[dim] // size) // layer.tp_size * size
    part.copy_(whole.narrow(dim, first, size))


class AdaptedDraftState(BlockDiffusionModelState):
    """Canvases are tokens; rows of a draft are marked where there is a LoRA for them."""

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        adapter = self.model.draft_adapter
        if adapter is not None:
            rows, slots = self.pass_rows, self.slots
            sampled = slice(rows.num_rows)
            slot, position = rows.slot[sampled], rows.position[sampled]
            is_draft = slots.way.choose(
                lambda way: way.layout, lambda layout: layout.drafted(position), slot
            )
            is_denoised = slots.phase == int(Phase.DENOISING)
            of_canvas = is_denoised & ~rows.of_slots.last_known
            is_draft = is_draft & of_canvas[slot]
            adapter.is_draft_row.zero_()[rows.index[sampled]] = is_draft
            adapter.acts = is_draft.device.type != "cpu" or bool(is_draft.any())
        return inputs


class AdaptedDraftModel(MaskedModel):
    """Mixin that precedes the class of vLLM that has the layers.

    Attributes:
        draft_adapter: The LoRA of rows of drafts; ``None`` without one.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        model_config = vllm_config.model_config
        self._is_diffusion = model_config.is_diffusion
        self.draft_adapter: DraftAdapter | None = None
        lora = self.find_draft_lora(model_config) if verifies_drafts(model_config) else None
        if lora is not None:
            max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self.draft_adapter = DraftAdapter(lora, self, max_num_tokens)  # type: ignore[arg-type]

    @staticmethod
    def find_draft_lora(model_config: ModelConfig) -> DraftLora | None:
        """The adapter of drafts, which start-up found too."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load them as vLLM's class does; the adapter's file is read once, and may be gone at an
        update.
        """
        is_first = not hasattr(self, "_was_loaded")
        loaded = super().load_weights(weights)
        if self.draft_adapter is not None and is_first:
            self.draft_adapter.load(self.loaded_rows)
        return loaded

    def loaded_rows(self, module: str, rows: Tensor) -> Tensor:
        """Return rows of an adapter in the order in which vLLM's class has a module's outputs.

        Args:
            module: Published name of the module.
            rows: [out_features, rank], in the checkpoint's order.
        """
        return rows

    def get_model_state_cls(self) -> type[ModelState]:
        """The state whose canvases are tokens; vLLM's own in the autoregressive mode."""
        return AdaptedDraftState if self._is_diffusion else DefaultModelState
