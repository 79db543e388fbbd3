"""Replay of recorded answers: how many tokens a draft would have had accepted, without a server.

A recorded answer is the target's own, so a proposal is accepted exactly where it equals the
answer's next token. For greedy answers this is what a server counts; for sampled answers it is the
mean of what a server counts, since a token is in the answer as often as the target draws it.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.calibration.calibrate import TargetEnds, split_samples
from vllm_diffusion.drafting.calibration.samples import Sample, read_sample
from vllm_diffusion.drafting.reference_draft import ReferenceDraft, load_draft
from vllm_diffusion.drafting.reveal_block import without_mask_token


@torch.no_grad()
def replay(
    draft: ReferenceDraft, embed: nn.Module, head: nn.Module, samples: Iterable[Sample]
) -> Verifications:
    """Verify a draft, in one pass over each block, along each answer.

    Args:
        draft: Draft to verify; its device and dtype are used.
        embed: The target's embedding, on the same device.
        head: The target's output head.
        samples: Samples that the draft was not trained on. Drafted tokens after the end of an
            answer are not counted.
    """
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    offsets = torch.arange(draft.block_size, device=device)[None]
    lengths = []
    for sample in samples:
        ids = sample.token_ids.to(device)
        rows = sample.hidden_states.flatten(1)[None].to(device, dtype)
        known = torch.arange(len(ids), device=device)[None]
        context = draft.context(rows, known)
        # The pass over the prompt gives the target's first token.
        anchor = max(sample.answer_start, 1)
        while anchor < len(ids) - 1:
            block = torch.full_like(offsets, draft.mask_token_id)
            block[0, 0] = ids[anchor]
            at = torch.full_like(offsets, anchor)
            out = draft(embed(block), anchor + offsets, at, context, known)[:, 1:]
            proposed = without_mask_token(head(out).float(), draft.mask_token_id).argmax(-1)[0]
            following = ids[anchor + 1 : anchor + draft.block_size]
            kept = int((proposed[: len(following)] == following).long().cumprod(0).sum())
            lengths.append(kept)
            anchor += kept + 1
    return Verifications.of(lengths, draft.block_size - 1)


def compare(
    samples: Path, ends: TargetEnds, new: Path, old: Path, device: str
) -> tuple[Verifications, Verifications]:
    """Replay the answers that are held out of training with two drafts.

    Args:
        samples: A folder of extracted hidden states.
        ends: Embedding and output head of the target, on ``device``.
        new: Folder of the new draft.
        old: Folder of the old draft.
        device: Torch device.

    Returns:
        Verifications of the new draft, and of the old one; none where nothing is held out.
    """
    _, files = split_samples(samples)
    drafts = [load_draft(folder).to(device) for folder in (new, old)]
    ours, theirs = (
        replay(
            draft,
            ends.embed,
            ends.head,
            (
                read_sample(path, len(draft.target_layer_ids), draft.config.hidden_size)
                for path in files
            ),
        )
        for draft in drafts
    )
    return ours, theirs
