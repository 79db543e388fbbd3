"""Definition of correct for drafts: speculative decoding with a DFlash draft, in plain PyTorch.

A *block* is an *anchor*, the last known token, which the target has not read, and masks after it.
Its rows attend to each other in both directions, and to the target's hidden states of the positions
before the anchor through keys and values of the draft's own.

Source: z-lab's DFlash (arXiv:2602.06036). Several passes over a block are this project's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from vllm_diffusion.drafting.reference_draft import KeysValues, ReferenceDraft
from vllm_diffusion.drafting.reference_draft import draft_config as draft_config
from vllm_diffusion.drafting.reference_draft import load_draft as load_draft
from vllm_diffusion.drafting.reference_draft import reach_of_layer as reach_of_layer
from vllm_diffusion.drafting.reference_draft import save_draft as save_draft
from vllm_diffusion.drafting.reveal_block import (
    CONFIDENCE,
    likeliest,
    revealed,
    unmask_counts,
    without_mask_token,
)


@dataclass
class Context:
    """Cache of a draft for one sequence: keys and values of every position the target has verified.

    It holds nothing of a block, so a rejected token leaves no trace here.

    Attributes:
        draft: Draft that computed them.
        keys_values: Keys and values of each layer, for positions 0 to ``length - 1``.
    """

    draft: ReferenceDraft
    keys_values: list[KeysValues] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.keys_values[0][0].shape[2] if self.keys_values else 0

    def append(self, rows: Tensor) -> None:
        """Append the target's hidden states of the next positions, [T, layers * hidden]."""
        start = self.length
        positions = torch.arange(start, start + len(rows), device=rows.device)[None]
        new = self.draft.context(rows[None], positions)
        if not self.keys_values:
            self.keys_values = new
            return
        self.keys_values = [
            (torch.cat([old[0], added[0]], 2), torch.cat([old[1], added[1]], 2))
            for old, added in zip(self.keys_values, new, strict=True)
        ]


@torch.no_grad()
def propose(
    context: Context,
    target: PreTrainedModel,
    anchor: int,
    *,
    steps: int = 1,
    schedule: str = "cosine",
    order: str = CONFIDENCE,
) -> tuple[Tensor, Tensor]:
    """Fill the masks after an anchor, the likeliest token each.

    Args:
        context: Cache of the positions before the anchor.
        target: Model whose embedding and head the draft uses.
        anchor: Token at position ``context.length``.
        steps: Number of passes over the block.
        schedule: Number of masks that each pass reveals (:func:`unmask_counts`).
        order: Order in which masks are revealed (:func:`revealed`).

    Returns:
        The proposals of a whole block, [num_proposals], int64, and the logits of the pass that
        revealed each, [num_proposals, vocab_size]; the mask token's are minus infinity.
    """
    draft, start = context.draft, context.length
    K = draft.block_size - 1
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    device = embed.weight.device
    block = torch.full((1, K + 1), draft.mask_token_id, device=device)
    block[0, 0] = anchor
    positions = torch.arange(start, start + K + 1, device=device)[None]
    known = torch.arange(start, device=device)[None]
    masked = torch.ones(1, K, dtype=torch.bool, device=device)
    kept = torch.zeros(1, K, head.weight.shape[0], device=device)
    for count in unmask_counts(K, steps, schedule):
        rows = draft(
            embed(block), positions, torch.full_like(positions, start), context.keys_values, known
        )
        logits = without_mask_token(head(rows[:, 1:]).float(), draft.mask_token_id)
        tokens, confidence = likeliest(logits)
        now = revealed(order, masked, confidence, count)
        block[:, 1:] = torch.where(now, tokens, block[:, 1:])
        kept = torch.where(now[..., None], logits, kept)
        masked &= ~now
    return block[0, 1:], kept[0]


def verify(
    target_probs: Tensor, proposals: Tensor, draft_probs: Tensor, generator: torch.Generator | None
) -> tuple[int, int]:
    """Accept as many proposals as the target's distribution allows, and draw the token after them.

    The accepted tokens have the target's distribution if each proposal was drawn from its row of
    ``draft_probs``, which must not depend on draws at later positions. A row with all of its mass
    on the proposal is always allowed.

    Args:
        target_probs: Probabilities of the target, [num_proposals + 1, vocab_size], float64.
        proposals: Drafted tokens, [num_proposals], int64.
        draft_probs: Probabilities of the draft, [num_proposals, vocab_size], float64, above 0 at
            the proposals.
        generator: Generator of the draws.

    Returns:
        The number of accepted proposals, and the next token.
    """
    chosen = proposals[:, None]
    ratio = (target_probs[:-1].gather(1, chosen) / draft_probs.gather(1, chosen)).squeeze(1)
    draws = torch.rand(ratio.shape, dtype=ratio.dtype, device=ratio.device, generator=generator)
    kept = int((draws < ratio).long().cumprod(0).sum())
    law = target_probs[kept]
    if kept < len(proposals):
        # The residual: probability that the target has in excess of the draft.
        law = (law - draft_probs[kept]).clamp(min=0)
    return kept, int(torch.multinomial(law, 1, generator=generator))


def context_rows(hidden_states: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Concatenate the outputs of the target's layers ``layer_ids``.

    Args:
        hidden_states: Output of ``transformers`` with ``output_hidden_states``: the embeddings,
            then each layer's output, [..., hidden] each.
        layer_ids: Layers counted from 0, in the order in which the draft was trained.

    Returns:
        [..., len(layer_ids) * hidden].
    """
    # [0] are the embeddings.
    return torch.cat([hidden_states[i + 1] for i in layer_ids], dim=-1)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return the probabilities that tokens are drawn from, float64; at temperature 0 one-hot."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (logits.double() / temperature).softmax(-1)


class Generated(NamedTuple):
    """One answer.

    Attributes:
        tokens: Tokens after the prompt, up to and including the first stop token.
        accepted: Number of proposals that each verification accepted, also after a stop token, as
            in vLLM's counters.
    """

    tokens: list[int]
    accepted: list[int]

    @property
    def tokens_per_verification(self) -> float:
        """Mean tokens per verification: the accepted proposals, and one more."""
        return 1 + sum(self.accepted) / max(1, len(self.accepted))


@torch.no_grad()
def spec_generate(
    target: PreTrainedModel,
    draft: ReferenceDraft,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    stop_token_ids: Sequence[int] = (),
    sampled: bool = False,
    steps: int = 1,
    schedule: str = "cosine",
    order: str = CONFIDENCE,
    generator: torch.Generator | None = None,
) -> Generated:
    """Generate an answer of the target, several tokens per pass, with the target's own
    distribution.

    Args:
        target: An autoregressive model of ``transformers`` with attention in every layer.
        draft: Draft that was trained for the target.
        input_ids: Prompt, [1, T], int64, on the target's device.
        max_new_tokens: Limit for the tokens of the answer.
        temperature: Temperature of the draws; 0 takes the likeliest token.
        stop_token_ids: Tokens that end the answer.
        sampled: True to propose tokens drawn from the draft's rows, in place of the likeliest.
        steps: Number of passes over a block. Each reveals the likeliest tokens.
        schedule: Number of masks that each pass reveals.
        order: Order in which masks are revealed.
        generator: Generator of the draws, on the target's device.
    """
    # Without the configuration no layer forgets what is before a window, so that all can be
    # cropped.
    cache = DynamicCache()
    context = Context(draft)

    def read(ids: Tensor) -> tuple[Tensor, Tensor]:
        # The cache by its place: its name is another since transformers 5.24.
        out = target(ids, None, None, cache, use_cache=True, output_hidden_states=True)
        return (
            probabilities(out.logits[0], temperature),
            context_rows(out.hidden_states, draft.target_layer_ids)[0],
        )

    law, rows = read(input_ids)
    context.append(rows)
    tokens = [int(torch.multinomial(law[-1], 1, generator=generator))]
    accepted: list[int] = []
    while len(tokens) < max_new_tokens and not set(stop_token_ids) & set(tokens):
        proposals, logits = propose(
            context, target, tokens[-1], steps=steps, schedule=schedule, order=order
        )
        draft_law = F.one_hot(proposals, logits.shape[-1]).double()
        if sampled and temperature > 0:
            draft_law = probabilities(logits, temperature)
            proposals = torch.multinomial(draft_law, 1, generator=generator)[:, 0]
        anchor = torch.tensor([tokens[-1]], device=input_ids.device)
        law, rows = read(torch.cat([anchor, proposals])[None])
        kept, following = verify(law, proposals, draft_law, generator)
        context.append(rows[: kept + 1])
        if rejected := len(proposals) - kept:
            cache.crop(-rejected)
        tokens += [*proposals[:kept].tolist(), following]
        accepted.append(kept)
    ends = [i for i, token in enumerate(tokens) if token in stop_token_ids]
    return Generated(tokens[: min([max_new_tokens, *(i + 1 for i in ends)])], accepted)
