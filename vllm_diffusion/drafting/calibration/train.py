"""Training of a draft on its target's hidden states.

Each sample gives many blocks at random anchors, all of them in one pass: a block sees the context
before its anchor, as it will when it drafts. Most blocks are all masks; of some a random share is
revealed, so that several passes find what they were trained on. What is learnt is the cross-entropy
of the masked tokens, those near the anchor more, since a proposal counts only if all before it do.

Source: z-lab's DFlash (arXiv:2602.06036), appendix A.1; random shares and Muon are this project's.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_diffusion.drafting.calibration.samples import Sample
from vllm_diffusion.drafting.calibration.train_settings import TrainSettings as TrainSettings
from vllm_diffusion.drafting.reference_draft import ReferenceDraft
from vllm_diffusion.drafting.reveal_block import without_mask_token

_IGNORED = -100


@dataclass(frozen=True)
class Progress:
    """State of a training run at one report.

    Attributes:
        step: Number of steps done.
        loss: Mean loss since the previous report, nats per masked token, weighted by position.
        loss_by_position: Loss of held-out blocks of masks, nats, for each position after the
            anchor.
        acceptance_by_position: Share of held-out blocks whose proposals are right up to and
            including this position; empty if nothing was held out. For samples of a target's greedy
            answers this is the share that the target will accept.
    """

    step: int
    loss: float
    loss_by_position: tuple[float, ...]
    acceptance_by_position: tuple[float, ...]

    @property
    def accepted(self) -> float:
        """Mean number of proposals of a block that are right before the first wrong one."""
        return sum(self.acceptance_by_position)


@dataclass(frozen=True)
class Blocks:
    """Blocks of a batch of samples; N is the number of rows of all blocks of a sample.

    Attributes:
        ids: Anchors, masks and revealed tokens, [B, N], int64.
        positions: Positions in the sequence, [B, N], int64.
        anchors: Position of each row's anchor, [B, N], int64; below 0 in a padding block.
        labels: Tokens under the masks, ``-100`` elsewhere, [B, N], int64.
    """

    ids: Tensor
    positions: Tensor
    anchors: Tensor
    labels: Tensor


class Batch:
    """Batch of samples on the draft's device, padded on the right.

    Attributes:
        token_ids: [B, T], int64.
        rows: Hidden states, [B, T, layers * hidden], in the draft's dtype.
        starts: Position at which each answer begins, [B], int64.
        lengths: Tokens of each sample, [B], int64.
    """

    def __init__(self, samples: Sequence[Sample], like: Tensor):
        device = like.device
        padded = nn.utils.rnn.pad_sequence
        self.token_ids = padded([each.token_ids for each in samples], batch_first=True).to(device)
        rows = [each.hidden_states.flatten(1) for each in samples]
        self.rows = padded(rows, batch_first=True).to(device, like.dtype)
        self.starts = torch.tensor([each.answer_start for each in samples], device=device)
        self.lengths = torch.tensor([len(each.token_ids) for each in samples], device=device)


def draw_blocks(
    batch: Batch,
    draft: ReferenceDraft,
    num_blocks: int,
    revealed_share: float,
    generator: torch.Generator,
) -> Blocks:
    """Draw blocks at different random anchors from each sample's answer.

    Args:
        batch: Samples.
        draft: Draft whose block size and mask token the blocks have.
        num_blocks: Blocks per sample, at most one for each anchor of its answer that has a token
            after it.
        revealed_share: Share of the blocks of which a share, uniform in 0..1, is revealed; at least
            one mask is left in each.
        generator: Generator of the draws, on the CPU.
    """
    token_ids, lengths = batch.token_ids, batch.lengths
    block_size = draft.block_size
    B, T = token_ids.shape
    device = token_ids.device

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).to(device)

    num_blocks = min(num_blocks, T)
    at = torch.arange(T, device=device)
    is_anchor = (at >= batch.starts[:, None]) & (at < lengths[:, None] - 1)
    scores = torch.where(is_anchor, rand(B, T), -1.0)
    best = scores.topk(num_blocks, dim=1)
    # Numbers below 0 differ, so that blocks that stand for none do not see each other.
    nobody = -torch.arange(1, num_blocks + 1, device=device)
    anchors = torch.where(best.values >= 0, best.indices, nobody)[..., None]  # [B, blocks, 1]

    offset = torch.arange(block_size, device=device)
    positions = anchors + offset
    is_text = (anchors >= 0) & (positions < lengths[:, None, None])
    index = positions.clamp(0, T - 1).flatten(1)
    tokens = token_ids.gather(1, index).view_as(positions)

    draws = rand(B, num_blocks, block_size - 1)
    ratio = torch.where(rand(B, num_blocks, 1) < revealed_share, rand(B, num_blocks, 1), 1.0)
    # The position with the lowest draw stays masked whatever the ratio.
    masked = draws <= torch.maximum(ratio, draws.amin(-1, keepdim=True))
    masked = F.pad(masked, (1, 0), value=False)
    # Positions after the text are masks too.
    hidden = masked | (~is_text & (offset > 0))
    ids = torch.where(hidden, draft.mask_token_id, tokens)
    labels = torch.where(masked & is_text, tokens, _IGNORED)
    return Blocks(
        ids.flatten(1),
        positions.flatten(1),
        anchors.expand_as(positions).flatten(1),
        labels.flatten(1),
    )


def block_logits(
    draft: ReferenceDraft, embed: nn.Module, head: nn.Module, batch: Batch, blocks: Blocks
) -> Tensor:
    """Return the rows' logits, [B, N, vocab_size], float32; the mask token's are minus infinity."""
    positions = torch.arange(batch.rows.shape[1], device=batch.rows.device)
    positions = positions.expand(batch.rows.shape[:2])
    context = draft.context(batch.rows, positions)
    out = draft(embed(blocks.ids), blocks.positions, blocks.anchors, context, positions)
    return without_mask_token(head(out).float(), draft.mask_token_id)


@torch.no_grad()
def measure(
    draft: ReferenceDraft,
    embed: nn.Module,
    head: nn.Module,
    samples: Sequence[Sample],
    *,
    anchors: int,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Measure loss and acceptance of one pass, by position.

    Args:
        draft: Draft to measure.
        embed: The target's embedding.
        head: The target's output head.
        samples: Held-out samples.
        anchors: Blocks per sample.
        seed: Seed of the anchors.

    Returns:
        The loss in nats, and the share of blocks that are right up to and including a position,
        both [block_size - 1]; only blocks whose text reaches the position count.
    """
    generator = torch.Generator().manual_seed(seed)
    K = draft.block_size - 1
    loss, right, counted = (torch.zeros(K) for _ in range(3))
    for start in range(0, len(samples), 16):
        batch = Batch(samples[start : start + 16], draft.fc.weight)
        blocks = draw_blocks(batch, draft, anchors, 0.0, generator)
        logits = block_logits(draft, embed, head, batch, blocks)
        labels = blocks.labels.view(-1, K + 1)[:, 1:]
        logits = logits.view(-1, K + 1, logits.shape[-1])[:, 1:]
        is_text = labels != _IGNORED
        nats = F.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none"
        )
        agrees = ((logits.argmax(-1) == labels) & is_text).long().cumprod(1)
        loss += nats.sum(0).cpu()
        right += agrees.sum(0).cpu()
        counted += is_text.sum(0).cpu()
    return loss / counted.clamp(min=1), right / counted.clamp(min=1)


def _learning_rate(settings: TrainSettings, share: float) -> float:
    """Return the learning rate after a ``share`` of the training, from 0 to 1."""
    steps = settings.steps
    rising = min(1.0, (share * steps + 1) / max(1.0, settings.warm_up * steps))
    falling = 0.5 * (1 + math.cos(math.pi * share))
    return settings.learning_rate * rising * (0.05 + 0.95 * falling)


def train(
    draft: ReferenceDraft,
    embed: nn.Module,
    head: nn.Module,
    samples: Iterable[Sample],
    settings: TrainSettings,
    *,
    held_out: Sequence[Sample] = (),
    report: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Progress]:
    """Train ``draft`` in place, on the device and in the dtype that it has.

    Args:
        draft: Draft to train, with random or trained weights.
        embed: The target's embedding; neither it nor the head is trained.
        head: The target's output head.
        samples: At least one batch; training ends early if they run out.
        settings: Settings of the training.
        held_out: Samples that progress is measured on.
        report: Called with the progress every ``settings.report_every`` steps, and at the end.
        clock: Seconds, which ``settings.minutes`` is compared with.

    Returns:
        All reports.

    Raises:
        ValueError: If there is no whole batch of samples, or the loss is not a number.
    """
    gamma = settings.gamma or draft.block_size / 2
    distance = torch.arange(draft.block_size, device=draft.fc.weight.device) - 1
    weight_of_offset = torch.exp(-distance / gamma)
    matrices = [p for p in draft.parameters() if p.dim() == 2]
    vectors = [p for p in draft.parameters() if p.dim() != 2]
    # The learning rate is set in each step.
    optimizers = [
        # Steps as large as AdamW's, so that one learning rate serves both.
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, weight_decay=0.0),
    ]
    generator = torch.Generator().manual_seed(settings.seed)
    for frozen in (embed, head):
        frozen.requires_grad_(False)
    draft.train()
    history: list[Progress] = []
    losses: list[float] = []
    step = 0
    start = clock()

    def note() -> None:
        nats = right = torch.zeros(0)
        if held_out:
            nats, right = measure(draft, embed, head, held_out, anchors=8)
        mean = sum(losses) / len(losses)
        history.append(Progress(step, mean, tuple(nats.tolist()), tuple(right.tolist())))
        report(history[-1])
        losses.clear()

    for batch in _batches(samples, settings, draft.fc.weight):
        share = step / settings.steps
        if settings.minutes is not None:
            share = max(share, (clock() - start) / (60 * settings.minutes))
            if share >= 1 and step:
                break
        step += 1
        blocks = draw_blocks(batch, draft, settings.anchors, settings.revealed_share, generator)
        logits = block_logits(draft, embed, head, batch, blocks)
        weights = weight_of_offset.repeat(blocks.labels.shape[1] // draft.block_size)
        weights = weights * (blocks.labels != _IGNORED)
        nats = F.cross_entropy(
            logits.transpose(1, 2), blocks.labels, ignore_index=_IGNORED, reduction="none"
        )
        loss = (nats * weights).sum() / weights.sum().clamp(min=1e-6)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = _learning_rate(settings, min(share, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"The loss is not a number after {step} steps; are the hidden states finite? "
                "A lower learning_rate may help."
            )
        if step % settings.report_every == 0:
            note()
    if losses:
        note()
    draft.eval()
    if not history:
        raise ValueError(
            f"There are fewer samples than one batch of {settings.batch_size}; record more."
        )
    return history


def _batches(samples: Iterable[Sample], settings: TrainSettings, like: Tensor) -> Iterator[Batch]:
    stream = iter(samples)
    for _ in range(settings.steps):
        chosen = list(itertools.islice(stream, settings.batch_size))
        if len(chosen) < settings.batch_size:
            return
        yield Batch(chosen, like)
