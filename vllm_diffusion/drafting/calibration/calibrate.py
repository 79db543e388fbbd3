"""Calibration of a draft: training on a folder of samples, an atomic write of the result, and the
comparison with another draft by a replay of recorded answers.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from vllm_diffusion.drafting.accepted import Verifications
from vllm_diffusion.drafting.calibration.picture import draw_training
from vllm_diffusion.drafting.calibration.samples import (
    Sample,
    is_held_out,
    read_sample,
    sample_files,
    shuffled_samples,
)
from vllm_diffusion.drafting.calibration.train import Progress, TrainSettings, measure, train
from vllm_diffusion.drafting.draft_check import check_fit
from vllm_diffusion.drafting.reference_draft import ReferenceDraft, load_draft, save_draft
from vllm_diffusion.drafting.reveal_block import without_mask_token

# Samples that progress is measured on.
_MAX_HELD_OUT = 64


class TargetEnds(NamedTuple):
    """Parts of a target that its draft shares.

    Attributes:
        config: Configuration of the target's text model.
        embed: Embedding, token ids to rows.
        head: Output head, rows to logits.
    """

    config: PreTrainedConfig
    embed: nn.Module
    head: nn.Module


def load_ends(target: str) -> TargetEnds:
    """Load the embedding and the output head of a model of ``transformers``, in float32.

    The whole model is in memory while they are taken.

    Raises:
        ValueError: If it cannot be loaded.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"target {target} cannot be loaded: {str(error).splitlines()[0]}"
        ) from None
    return TargetEnds(
        model.config.get_text_config(),
        model.get_input_embeddings().float(),
        model.get_output_embeddings().float(),
    )


def load_first_draft(folder: Path) -> ReferenceDraft:
    """Load the draft that training starts from.

    Raises:
        ValueError: If it cannot be read.
    """
    try:
        return load_draft(folder)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"--from {folder} cannot be read: {error}") from None


def calibrate(
    samples: Path,
    ends: TargetEnds,
    draft: ReferenceDraft,
    out: Path,
    settings: TrainSettings,
    *,
    device: str,
    report: Callable[[Progress], None],
    clock: Callable[[], float],
) -> list[Progress]:
    """Train a draft in place, and save it with a picture of the training, whole or not at all.

    Args:
        samples: A folder that :func:`~vllm_diffusion.drafting.calibration.extract.extract` wrote.
        ends: Embedding and output head of the target.
        draft: Draft to train.
        out: Folder for the trained draft, in z-lab's layout, which vLLM loads; it must not exist.
        settings: Settings of the training.
        device: Torch device that trains.
        report: Called with each progress; first with the untrained draft's, as step 0.
        clock: Seconds, which ``settings.minutes`` is compared with.

    Returns:
        All reports of the training.

    Raises:
        ValueError: Naming the field, the file or the option and the remedy, before anything is
            trained; and as :func:`~vllm_diffusion.drafting.calibration.train.train`.
    """
    learnt, held_out = split_samples(samples)
    check_fit(
        draft.config,
        "config.json of the draft",
        vocab_size=ends.config.vocab_size,
        hidden_size=ends.config.hidden_size,
        num_layers=ends.config.num_hidden_layers,
    )
    _check_tokens([*learnt, *held_out], draft)
    size = len(draft.target_layer_ids), draft.config.hidden_size
    draft.to(device)
    embed, head = ends.embed.to(device), ends.head.to(device)
    measured = [read_sample(path, *size) for path in held_out]
    if measured:
        nats, right = measure(draft, embed, head, measured, anchors=8)
        report(Progress(0, nats.mean().item(), tuple(nats.tolist()), tuple(right.tolist())))
    history = train(
        draft,
        embed,
        head,
        shuffled_samples(learnt, *size, seed=settings.seed),
        settings,
        held_out=measured,
        report=report,
        clock=clock,
    )
    _save(draft, history, out)
    return history


def split_samples(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files to train on and the files to measure on.

    The latter are the held-out ones, or a tenth of all where none are held out.

    Raises:
        ValueError: If there is nothing to train on.
    """
    files = sample_files(folder)
    held_out = [path for path in files if is_held_out(path)]
    learnt = [path for path in files if not is_held_out(path)]
    if not held_out:
        held_out = learnt[: len(learnt) // 10]
        learnt = learnt[len(held_out) :]
    if not learnt:
        raise ValueError(
            f"{folder} has nothing to train on: all {len(files)} samples are held out; record more."
        )
    return learnt, held_out[:_MAX_HELD_OUT]


def _check_tokens(files: Sequence[Path], draft: ReferenceDraft) -> None:
    """Check that no token is the mask, which drafts never propose."""
    for path in files:
        try:
            with safe_open(path, "pt") as tensors:
                ids: Tensor = tensors.get_tensor("token_ids")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {error}; extract again.") from None
        if bool((ids == draft.mask_token_id).any()):
            raise ValueError(
                f"{path} contains the draft's mask_token_id={draft.mask_token_id}, which must be a "
                "token that no text has; delete this sample, or train a draft with another mask token."
            )


def _save(draft: ReferenceDraft, history: Sequence[Progress], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    dtype = getattr(draft.config, "dtype", None)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        save_draft(draft, staging, dtype if isinstance(dtype, torch.dtype) else torch.float32)
        (staging / "training.svg").write_text(draw_training(history), encoding="utf-8")
        # As other checkpoints are: whoever serves it may not be who trained it.
        staging.chmod(0o755)
        for path in staging.iterdir():
            path.chmod(0o644)
        staging.rename(out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


@torch.no_grad()
def replay(
    draft: ReferenceDraft, embed: nn.Module, head: nn.Module, samples: Iterable[Sample]
) -> Verifications:
    """Verify a draft, in one pass over each block, along each answer: without a server.

    A recorded answer is the target's own, so a proposal is accepted exactly where it equals the
    answer's next token. For greedy answers this is what a server counts; for sampled answers it is
    the mean of what a server counts, since a token is in the answer as often as the target draws
    it.

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
) -> list[Verifications]:
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
    found = []
    for folder in (new, old):
        draft = load_draft(folder).to(device)
        size = len(draft.target_layer_ids), draft.config.hidden_size
        held_out = (read_sample(path, *size) for path in files)
        found.append(replay(draft, ends.embed, ends.head, held_out))
    return found
