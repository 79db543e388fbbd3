"""DFlash draft that reveals its block in several passes."""

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from vllm_diffusion.drafting.draft_settings import draft_settings
from vllm_diffusion.drafting.reveal_block import likeliest, revealed, without_mask_token


class DFlashMaskedDraftModel(DFlashQwen3ForCausalLM):
    """vLLM's DFlash draft in several passes: each reveals some masks for the next ones to see.

    A block is an anchor, the target's last token, and masks. Every pass runs the same rows at the
    same positions and cache slots, so a block's keys and values are overwritten. The hidden row
    that is returned for a position is that of the pass that revealed it. The token that vLLM
    proposes from it, argmax or draw, then has a distribution that does not depend on the proposals
    at other positions, and its verification is exact.

    The positions that a pass reveals are chosen on the device, by a number of operations that does
    not depend on the batch: a CUDA graph holds all passes.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        settings = draft_settings(vllm_config)
        self.num_drafts: int = vllm_config.speculative_config.num_speculative_tokens
        self.order = settings.order
        self.unmask_counts = settings.unmask_counts(self.num_drafts)
        self.mask_token_id = int(self.model.mask_token_id)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Compute vLLM's logits, with the mask token's at minus infinity."""
        logits = super().compute_logits(hidden_states)
        return None if logits is None else without_mask_token(logits, self.mask_token_id)

    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Compute the hidden rows of blocks.

        Args:
            input_ids: [num_tokens], int32: an anchor and its masks, block after block. Rows after
                the last whole block are padding.
            positions: [num_tokens], int64.
            inputs_embeds: Always ``None`` for DFlash.

        Returns:
            [num_tokens, hidden_size].
        """
        *counts, _ = self.unmask_counts
        hidden = super().forward(input_ids, positions, inputs_embeds)
        if not counts:
            return hidden
        width = self.num_drafts + 1
        num_blocks = input_ids.shape[0] // width
        num_rows = num_blocks * width
        # The engine's own tensor keeps its masks.
        input_ids = input_ids.clone()
        tokens = input_ids[:num_rows].view(num_blocks, width)[:, 1:]
        masked = torch.ones_like(tokens, dtype=torch.bool)
        kept = hidden.clone()
        for count in counts:
            rows = _without_anchors(hidden, num_rows, width)
            logits = self.compute_logits(rows.flatten(0, 1))
            assert logits is not None
            drafts, confidence = (
                one.view(num_blocks, self.num_drafts) for one in likeliest(logits)
            )
            now = revealed(self.order, masked, confidence, count)
            tokens.copy_(torch.where(now, drafts.to(tokens.dtype), tokens))
            masked &= ~now
            hidden = super().forward(input_ids, positions)
            # Rows of positions that are still masked; a later pass may overwrite them.
            of_kept = _without_anchors(kept, num_rows, width)
            of_kept.copy_(
                torch.where(masked[..., None], _without_anchors(hidden, num_rows, width), of_kept)
            )
        return kept


def _without_anchors(rows: Tensor, num_rows: int, width: int) -> Tensor:
    """Return a view [num_blocks, width - 1, hidden_size] of ``rows`` [num_tokens, hidden_size]."""
    return rows[:num_rows].view(num_rows // width, width, rows.shape[-1])[:, 1:]
