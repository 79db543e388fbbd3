"""Model state of models whose passes run on embeddings, with pictures among those of prompts."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_diffusion.runner.model_state import BlockDiffusionModelState


class EmbeddedModelState(BlockDiffusionModelState):
    """State of a model whose passes run on embeddings."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: Any,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        # A captured graph reads the embeddings at this address.
        self._inputs_embeds = torch.zeros(
            self.max_num_tokens,
            self.model_config.get_hidden_size(),
            dtype=self.dtype,
            device=device,
        )
        self._mm_embeds: tuple[list[Tensor], Tensor] | None = None

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> Tensor | None:
        if self.supports_mm_inputs:
            self.execute_mm_encoder(scheduled_encoder_inputs)
            embeds, is_mm_embed = self.gather_mm_embeddings(input_batch)
            self._mm_embeds = (embeds, is_mm_embed) if embeds else None
        return None

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Embed the token ids and pictures of the pass."""
        self._fill_ids(input_batch, req_states)
        self._embed_tokens(input_batch)
        return {"inputs_embeds": self._inputs_embeds[: input_batch.num_tokens_after_padding]}

    def _embed_tokens(self, input_batch: InputBatch) -> None:
        """Write plain embeddings of all rows, images among them."""
        input_ids = input_batch.input_ids[: input_batch.num_tokens]
        if self._mm_embeds is None:
            embeds = self.model.embed_input_ids(input_ids)
        else:
            mm_embeds, is_mm_embed = self._mm_embeds
            self._mm_embeds = None
            embeds = self.model.embed_input_ids(
                input_ids, multimodal_embeddings=mm_embeds, is_multimodal=is_mm_embed
            )
        self._inputs_embeds[: input_batch.num_tokens] = embeds

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {"inputs_embeds": self._inputs_embeds[:num_tokens]}
