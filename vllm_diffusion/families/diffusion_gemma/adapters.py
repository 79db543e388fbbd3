"""DiffusionGemma's LoRA adapters: one part for the encoder's rows, and one for the decoder's.

PEFT sees the encoder's layers and the decoder's, which share their weights, and trains matrices for
each. NeMo trains one stack, named ``model.layers``, and merges its adapters into the shared
weights: such matrices are of both parts. Here they are the same layers, and a row of a pass is the
one's or the other's: known tokens are the encoder's, and rows of a canvas that is being denoised
the decoder's. So an adapter has two of the places that vLLM's layers keep matrices in, and each row
is given the one that it reads, on the device, since only there is known which canvases finished.
Self-conditioning is the decoder's alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.punica_wrapper import get_punica_wrapper
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_diffusion.families.diffusion_gemma.startup import DECODER, ENCODER
from vllm_diffusion.weights.adapters.adapter_rows import write_slots

# Its module, whose rows are canvas rows alone.
_CONDITIONING = "self_conditioning"


class EncoderDecoderLora(LoRAModel):
    """An adapter: vLLM's holds the encoder's part, and this adds the decoder's; either may be
    empty.
    """

    decoder: LoRAModel

    @classmethod
    def from_lora_tensors(
        cls, lora_model_id: int, tensors: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> EncoderDecoderLora:
        # A name of the shared stack has neither prefix; the encoder has no self-conditioning.
        encoder = {
            name: x
            for name, x in tensors.items()
            if DECODER not in name and _CONDITIONING not in name
        }
        # vLLM multiplies the matrices of a part by the adapter's factor in place.
        decoder = {
            name: x.clone() if name in encoder else x
            for name, x in tensors.items()
            if ENCODER not in name
        }
        lora: EncoderDecoderLora = super().from_lora_tensors(
            lora_model_id, encoder, *args, **kwargs
        )
        lora.decoder = LoRAModel.from_lora_tensors(lora_model_id, decoder, *args, **kwargs)
        return lora


class EncoderDecoderAdapters(LRUCacheLoRAModelManager):
    """vLLM's manager with two places for each adapter: the encoder's, then as many for the
    decoder's.
    """

    lora_config: LoRAConfig

    # What vLLM calls.

    def _init_punica_wrapper(self, max_num_batched_tokens: int, vllm_config: Any) -> None:
        with self._counting_both():
            super()._init_punica_wrapper(max_num_batched_tokens, vllm_config)
            self._of_canvases = get_punica_wrapper(
                max_num_batched_tokens,
                max_batches=self.max_num_seqs,
                device=self.device,
                lora_config=self.lora_config,
            )
        (language_model,) = self.mm_mapping.language_model
        self._of_layers = self.punica_wrapper_mapping[language_model]
        self.punica_wrapper_mapping[_CONDITIONING] = self._of_canvases
        # The encoder's place of each row of the pass, -1 without an adapter, where graphs read it.
        self._places = torch.full(
            (max_num_batched_tokens,), -1, dtype=torch.long, device=self.device
        )
        self._num_rows = 0
        self._is_used = False

    def _create_lora_modules(self) -> None:
        with self._counting_both():
            super()._create_lora_modules()

    def _add_adapter(self, lora: LoRAModel) -> None:
        for part in _parts(lora):
            self._copy_keys_to_values(part)
            # vLLM's looks at the first of them.
            if part.loras:
                self._create_merged_loras_inplace(part)
        self._registered_adapters[lora.id] = lora

    def activate_adapter(self, lora_id: int) -> bool:
        is_new = super().activate_adapter(lora_id)
        if is_new:
            decoder = _parts(self._registered_adapters[lora_id])[-1]
            place = self.lora_slots + self.lora_index_to_id.index(lora_id)
            for name, module in self.modules.items():
                weights = self._get_lora_layer_weights(decoder, name)
                if weights is None:
                    module.reset_lora(place)
                else:
                    module.set_lora(place, weights.lora_a, weights.lora_b)
        return is_new

    def _set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Rows by adapter, all as the encoder's; which are the decoder's is said for each pass."""
        ids = np.asarray(mapping.index_mapping, dtype=np.int64)
        place_of = np.full(ids.max(initial=0) + 1, -1)
        for place, lora_id in enumerate(self.lora_index_to_id):
            if lora_id is not None and lora_id < place_of.size:
                place_of[lora_id] = place
        places = place_of[ids]
        self._num_rows = ids.size
        self._is_used = bool((places >= 0).any())
        async_tensor_h2d(places, out=self._places[: ids.size])
        write_slots(self._of_layers, self._places[: ids.size], is_used=self._is_used)

    # What the model's state calls.

    def assign_rows(self, canvas_rows: Tensor, is_denoised: Tensor) -> None:
        """Give each row of the pass its part of its request's adapter.

        vLLM states which adapter a row has only where that changed, and the same rows may be
        canvases now.

        Args:
            canvas_rows: [num_canvas_rows], int64, where in the pass they are.
            is_denoised: [num_canvas_rows], bool: whether they are the decoder's.
        """
        if not self._is_used:
            return
        slots = self._places[: self._num_rows].clone()
        place = slots[canvas_rows]
        is_decoders = is_denoised & (place >= 0)
        slots[canvas_rows] = torch.where(is_decoders, place + self.lora_slots, place)
        write_slots(self._of_layers, slots)

    def assign_canvas_rows(self, canvas_rows: Tensor) -> None:
        """Give each row of self-conditioning its adapter; a graph may hold the call.

        Args:
            canvas_rows: [num_canvas_rows], int64, where in the pass they are.
        """
        place = self._places[canvas_rows]
        write_slots(self._of_canvases, torch.where(place >= 0, place + self.lora_slots, -1))

    @contextmanager
    def _counting_both(self) -> Iterator[None]:
        """With places for both parts of each adapter in what vLLM allocates."""
        config = self.lora_config
        self.lora_config = copy(config)
        self.lora_config.max_loras = 2 * config.max_loras
        try:
            yield
        finally:
            self.lora_config = config

    def _copy_keys_to_values(self, part: LoRAModel) -> None:
        """Full-attention layers have no ``v_proj``: what projects their keys projects their
        values.
        """
        for name, weights in list(part.loras.items()):
            stem, _, end = name.rpartition("k_proj")
            value = f"{stem}v_proj"
            if not stem or end:
                continue
            layer = int(name.partition(".layers.")[2].partition(".")[0])
            if self.model.config.text_config.layer_types[layer] != "full_attention":
                continue
            copied = part.loras[value] = copy(weights)
            copied.module_name = value
            # vLLM multiplies it by the adapter's factor in place.
            copied.lora_b = weights.lora_b.clone()


def _parts(lora: LoRAModel) -> tuple[LoRAModel, ...]:
    """Encoder's and decoder's; an adapter that vLLM made to warm up is both."""
    return (lora, lora.decoder) if isinstance(lora, EncoderDecoderLora) else (lora,)
