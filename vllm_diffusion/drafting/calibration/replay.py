"""What a draft would have kept of answers that were recorded, without a server.

A recorded answer is the target's own, so that a proposal is kept exactly where it is what the answer
goes on with. Of greedy answers this is what a server counts; of sampled ones, what it counts in the
mean, since a proposal that the target draws with a probability is in the answer as often.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.calibration.samples import Sample
from vllm_diffusion.drafting.reference import ReferenceDraft
from vllm_diffusion.drafting.reveal import without_mask_token


@torch.no_grad()
def replay(
    draft: ReferenceDraft, embed: nn.Module, head: nn.Module, samples: Iterable[Sample]
) -> Verifications:
    """Verify a draft, in one pass over each block, along each answer.

    Args:
        draft: On the device and in the dtype that it has.
        embed: The target's embedding, on the same device.
        head: The target's output head.
        samples: Held out of what the draft was trained on. What would be drafted behind the end of an
            answer is not counted.
    """
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    offsets = torch.arange(draft.block_size, device=device)[None]
    lengths = []
    for sample in samples:
        ids = sample.token_ids.to(device)
        rows = sample.hidden_states.flatten(1)[None].to(device, dtype)
        known = torch.arange(len(ids), device=device)[None]
        context = draft.context(rows, known)
        # The target's first token is of its pass over the prompt.
        anchor = max(sample.answer_start, 1)
        while anchor < len(ids) - 1:
            block = torch.full_like(offsets, draft.mask_token_id)
            block[0, 0] = ids[anchor]
            at = torch.full_like(offsets, anchor)
            out = draft(embed(block), anchor + offsets, at, context, known)[:, 1:]
            proposed = without_mask_token(head(out).float(), draft.mask_token_id).argmax(-1)[0]
            said = ids[anchor + 1 : anchor + draft.block_size]
            kept = int((proposed[: len(said)] == said).long().cumprod(0).sum())
            lengths.append(kept)
            anchor += kept + 1
    return Verifications.of(lengths, draft.block_size - 1)
