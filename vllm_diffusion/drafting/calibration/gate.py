"""Comparison of two drafts along recorded answers, in a process of its own.

python -m vllm_diffusion.drafting.calibration.gate SAMPLES TARGET NEW OLD
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.calibration.calibrate import check_samples, load_ends, split_samples
from vllm_diffusion.drafting.calibration.replay import replay
from vllm_diffusion.drafting.calibration.samples import read_extraction, read_sample
from vllm_diffusion.drafting.reference import load_draft


def compare(samples: Path, target: str, drafts: Sequence[Path]) -> list[Verifications]:
    """Replay the answers that are held out of training with each draft.

    Args:
        samples: A folder of ``calibrate extract``.
        target: Target that the samples were extracted from.
        drafts: Folders of the drafts.

    Raises:
        ValueError: If they do not belong to one another.
    """
    ends, (_, files) = load_ends(target), split_samples(samples)
    extraction, found = read_extraction(samples), []
    for folder in drafts:
        draft = load_draft(folder)
        check_samples(extraction, ends.config, draft)
        size = len(draft.target_layer_ids), draft.config.hidden_size
        held_out = (read_sample(path, *size) for path in files)
        found.append(replay(draft, ends.embed, ends.head, held_out))
    return found


def main(samples: str, target: str, new: str, old: str) -> None:
    """Print the figures of both drafts and the verdict on the new one as a line of JSON."""
    ours, theirs = compare(Path(samples), target, [Path(new), Path(old)])
    print(
        json.dumps(
            {
                "new": ours.tokens,
                "old": theirs.tokens,
                "verifications": [ours.number, theirs.number],
                "is_better": ours.is_better_than(theirs),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
