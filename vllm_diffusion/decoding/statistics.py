"""What the sampler says of each position, and a rule decides from."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PositionStatistics(NamedTuple):
    """Statistics of positions: of n rows, [n], or of each position of each slot, [R, C].

    A slot without rows in the pass has what an earlier pass left there, and nothing reads it.

    Attributes:
        argmax: int64, the likeliest token.
        candidate: int64, the token drawn at each position.
        entropy: float32, nats, at the temperature of judging: of all tokens, or where the rule
            ``judges_filtered`` of what the request's filters keep.
        drawn_confidence: float32, probability of ``candidate`` in the distribution that it was
            drawn from.
        confidence: float32, the probability of ``argmax``; ``None`` unless the rule looks at more
            choices than that.
        choices: [..., K], int64, the K likeliest tokens, the likeliest first, K being the rule's
            ``num_choices``; a position with fewer possible ones repeats its last. ``None`` where
            that is 0.
        margin: float32, the probability of the likeliest token less that of the next one, of what
            the request's filters keep; ``None`` unless the rule ``judges_filtered``. Only those of
            requests for which it ``reads_margin`` are computed.
        named: [..., M], float32, probabilities of the rule's ``named_tokens``; ``None`` if there
            are none.
        soft_embeds: [n, hidden_size], float32, of rows alone: token embeddings weighted by their
            probability, for a model with self-conditioning.
    """

    argmax: Tensor
    candidate: Tensor
    entropy: Tensor
    drawn_confidence: Tensor
    confidence: Tensor | None = None
    choices: Tensor | None = None
    margin: Tensor | None = None
    named: Tensor | None = None
    soft_embeds: Tensor | None = None

    @property
    def num_likeliest(self) -> int:
        """K, likeliest tokens of each position in ``choices``; 0 without them."""
        return 0 if self.choices is None else self.choices.shape[-1]

    def write(self, slot: Tensor, position: Tensor, values: PositionStatistics) -> None:
        """Put statistics of rows at their places, as far as these are kept of slots.

        Args:
            slot: [n], int64, of each row.
            position: [n], int64, of each row in its canvas.
            values: Of the rows.
        """
        for held, own in zip(self, values, strict=True):
            if held is not None and own is not None:
                held[slot, position] = own
