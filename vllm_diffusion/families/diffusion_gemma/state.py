"""DiffusionGemma's state: canvas embeddings with gated self-conditioning, and image spans."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_diffusion.attention.metadata import write_image_spans
from vllm_diffusion.canvas.compiled import compiled_by_rows
from vllm_diffusion.canvas.slots import Phase
from vllm_diffusion.families.diffusion_gemma.adapters import EncoderDecoderAdapters
from vllm_diffusion.runner.embedded_state import EmbeddedModelState
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.startup.cuda_graphs import GraphCall, GraphedFunction


class DiffusionGemmaModelState(EmbeddedModelState):
    """State of one engine that serves DiffusionGemma."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: Any,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        text_config = self.model_config.hf_text_config
        hidden_size = text_config.hidden_size
        # Last step's probability-weighted embedding of each canvas position.
        self.soft_embeds: Tensor = torch.zeros(
            self.max_num_reqs, self.canvas_length, hidden_size, dtype=self.dtype, device=device
        )
        self._embed_canvases = GraphedFunction(self._condition_canvases)
        self._compile(self.pass_rows.compile_backend)
        # Made with the model where --enable-lora asks for it.
        self._adapters: EncoderDecoderAdapters | None = getattr(model, "lora_manager", None)
        self._has_image_spans = (
            self.supports_mm_inputs
            and getattr(text_config, "use_bidirectional_attention", None) == "vision"
        )

    def _compile(self, backend: str | None) -> None:
        self._read = compiled_by_rows(self._read_canvases, backend)
        self._write = compiled_by_rows(self._write_embeds, backend)
        self._store = compiled_by_rows(self._store_scaled, backend)

    def output_head(self) -> OutputHead:
        return OutputHead.of(
            self.model.lm_head,
            self.model.model.embed_tokens,
            softcap=self.model.softcap,
            dtype=self.model.logits_processor.head_dtype,
        )

    def store_soft_embeds(self, soft_embeds: Tensor, slot: Tensor, position: Tensor) -> None:
        self._store(slot, position, soft_embeds, normalizer=self.model.model.normalizer)

    def _store_scaled(
        self, slot: Tensor, position: Tensor, soft_embeds: Tensor, normalizer: Tensor
    ) -> None:
        self.soft_embeds[slot, position] = (soft_embeds * normalizer).to(self.dtype)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        pass_rows, num_rows = self.pass_rows, input_batch.num_draft_tokens
        rows = pass_rows.index[:num_rows]
        if self._adapters is not None:
            self._adapters.assign_rows(rows, self._is_denoised(pass_rows.slot[:num_rows]))
        is_decoder_row = self.model.is_decoder_row
        if is_decoder_row is not None and num_rows < input_batch.num_tokens:
            # Known tokens are the encoder's. Where there are none, every row is written below.
            is_decoder_row.zero_()
        if num_rows < input_batch.num_tokens:
            self._fill_ids(input_batch, req_states)
            # Those of canvases come after.
            self._embed_tokens(input_batch)
        if num_rows > 0:
            self._embed_canvases(rows)
        return {"inputs_embeds": self._inputs_embeds[: input_batch.num_tokens_after_padding]}

    def _is_denoised(self, slot: Tensor) -> Tensor:
        """Tell canvas rows of the decoder, [num_rows], bool, from those of finished canvases, which
        are the encoder's.
        """
        phase: Tensor = self.slots.phase[slot]
        return phase != int(Phase.COMMITTING)

    def _condition_canvases(self, rows: Tensor) -> None:
        """Write self-conditioned embeddings of canvas rows into the pass's embeddings.

        Rows of a finished canvas that is being encoded have plain embeddings: the encoder has no
        such module.

        Args:
            rows: [num_rows], int64, where in the pass they are: the beginning of
                ``pass_rows.index``.
        """
        pass_rows = self.pass_rows
        slot, position = pass_rows.slot[: len(rows)], pass_rows.position[: len(rows)]
        tokens, signal = self._read(slot, position)
        plain = self.model.embed_input_ids(tokens)
        if self._adapters is not None:
            self._adapters.assign_canvas_rows(rows)
        conditioned = self.model.self_conditioning(plain, signal)
        is_decoder_row = self.model.is_decoder_row
        self._write(rows, slot, conditioned, plain, is_decoder_row=is_decoder_row)

    def _read_canvases(self, slot: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of canvas rows, [num_rows], int64, and signals of their last step, [num_rows,
        hidden_size].
        """
        slots = self.slots
        # The first step of a canvas has nothing to go by; a pinned position is given none.
        has_signal = (slots.step[slot] > 0) & ~slots.pinned[slot, position]
        signal = torch.where(has_signal[:, None], self.soft_embeds[slot, position], 0)
        return slots.canvas[slot, position], signal

    def _write_embeds(
        self,
        rows: Tensor,
        slot: Tensor,
        conditioned: Tensor,
        plain: Tensor,
        is_decoder_row: Tensor | None,
    ) -> None:
        """Write the embeddings of canvas rows, [num_rows, hidden_size] each, and whose they are."""
        is_denoised = self._is_denoised(slot)
        self._inputs_embeds[rows] = torch.where(is_denoised[:, None], conditioned, plain)
        if is_decoder_row is not None:
            is_decoder_row[rows] = is_denoised

    def graph_calls(self, counts: range) -> list[GraphCall]:
        C, index = self.canvas_length, self.pass_rows.index
        embed = [GraphCall(self._embed_canvases, (index[: n * C],)) for n in counts]
        return super().graph_calls(counts) + embed

    def row_spans(self, input_batch: InputBatch, num_tokens: int) -> Tensor | None:
        """Return the image that each prompt row lies in, from positions known on the host."""
        if not self._has_image_spans or not input_batch.has_prefill:
            return None
        spans = np.zeros((num_tokens, 2), dtype=np.int32)
        starts = input_batch.query_start_loc_np
        for i, req_id in enumerate(input_batch.req_ids):
            if input_batch.is_prefilling_np[i]:
                first_position = int(input_batch.num_computed_tokens_np[i])
                for feature in self.encoder_cache.mm_features.get(req_id, ()):
                    ranges = feature.mm_position.extract_embeds_range()
                    write_image_spans(spans[starts[i] : starts[i + 1]], first_position, ranges)
        return async_tensor_h2d(spans, device=self.device) if spans.any() else None
