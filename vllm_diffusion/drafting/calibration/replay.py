"""Replay of recorded answers: how many tokens a draft would have had accepted, without a server.

python -m vllm_diffusion.drafting.calibration.replay SAMPLES TARGET NEW OLD

A recorded answer is the target's own, so a proposal is accepted exactly where it equals the
answer's next token. For greedy answers this is what a server counts; for sampled answers it is the
mean of what a server counts, since a token is in the answer as often as the target draws it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.calibration.calibrate import check_samples, load_ends, split_samples
from vllm_diffusion.drafting.calibration.samples import Sample, read_extraction, read_sample
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


def main(samples: str, target: str, new: str, old: str) -> None:
    """Replay the answers that are held out of training with two drafts.

    This prints the figures of both and the verdict on the new one as a line of JSON.

    Args:
        samples: A folder of ``calibrate extract``.
        target: Target that the samples were extracted from.
        new: Folder of the new draft.
        old: Folder of the old draft.

    Raises:
        ValueError: If they do not belong to one another.
    """
    ends, (_, files) = load_ends(target), split_samples(Path(samples))
    extraction, replays = read_extraction(Path(samples)), []
    for folder in (new, old):
        draft = load_draft(folder)
        check_samples(extraction, ends.config, draft)
        size = len(draft.target_layer_ids), draft.config.hidden_size
        held_out = (read_sample(path, *size) for path in files)
        replays.append(replay(draft, ends.embed, ends.head, held_out))
    ours, theirs = replays
    figures = {"new": ours.tokens, "old": theirs.tokens, "is_better": ours.is_better_than(theirs)}
    print(json.dumps(figures | {"verifications": [ours.number, theirs.number]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
