"""Statistics of each row after some tiles of the vocabulary, and the keys of its draws."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.noise import gumbel_noise, random_words, random_words_of


class RowDraws(NamedTuple):
    """One entry per row: its temperatures and the key of its noise.

    Attributes:
        temperature: [num_rows], float32, above 0: of the schedule. Divides the logits.
        request_temperature: [num_rows], float32: scales the candidate's distribution on top of it;
            0 draws the argmax.
        seed: [num_rows], int64.
        canvas_idx: [num_rows], int32.
        step: [num_rows], int32, below 2**24.
        position: [num_rows], int32.
    """

    temperature: Tensor
    request_temperature: Tensor
    seed: Tensor
    canvas_idx: Tensor
    step: Tensor
    position: Tensor

    @property
    def rate(self) -> Tensor:
        """[num_rows], float32: what the candidate's logits are divided by after ``temperature``."""
        return torch.where(self.request_temperature == 0, 1.0, self.request_temperature)

    @property
    def is_greedy(self) -> bool:
        """True if no row draws; waits for the device."""
        return not bool(self.request_temperature.any())

    def rows(self, some: slice | Tensor) -> RowDraws:
        """Select the draws of some rows."""
        return RowDraws(*(field[some] for field in self))

    def noise(self, num_ids: int, first_id: int) -> Tensor:
        """[num_rows, num_ids], float32: Gumbel noise of some ids; zero in a greedy row."""
        words = random_words(
            self.seed, self.canvas_idx, self.step, self.position, num_ids, first_id
        )
        return torch.where(self.request_temperature[:, None] == 0, 0.0, gumbel_noise(words))

    def noise_of(self, ids: Tensor) -> Tensor:
        """[num_rows], float32: noise of one id of each row; zero in a greedy row."""
        words = random_words_of(self.seed, self.canvas_idx, self.step, self.position, ids)
        return torch.where(self.request_temperature == 0, 0.0, gumbel_noise(words))


class FilteredDraw(NamedTuple):
    """Draw among the ids that a filter keeps; x are their logits over a divisor.

    Attributes:
        best: [num_rows], float32: largest x + Gumbel noise; minus infinity if nothing is possible.
        candidate: [num_rows], int64: the first id with it.
        drawn: [num_rows], float32: x of the candidate.
        mass: [num_rows], float32: sum of exp(x - maximum).
    """

    best: Tensor
    candidate: Tensor
    drawn: Tensor
    mass: Tensor


@dataclass(frozen=True)
class RunningStatistics:
    """Statistics of the tiles that a row has seen; x are its logits over the schedule's
    temperature.

    Attributes:
        maximum: [num_rows], float32: maximum of x.
        total: [num_rows], float32: sum of exp(x - maximum).
        weighted: [num_rows], float32: sum of exp(x - maximum) * (x - maximum).
        argmax: [num_rows], int64: the first id with the largest x.
        best: [num_rows], float32: largest x / request_temperature + Gumbel noise.
        candidate: [num_rows], int64: the first id with it.
        drawn: [num_rows], float32: x of the candidate; minus infinity as long as nothing is
            possible.
    """

    maximum: Tensor
    total: Tensor
    weighted: Tensor
    argmax: Tensor
    best: Tensor
    candidate: Tensor
    drawn: Tensor

    @staticmethod
    def empty(num_rows: int, device: torch.device) -> RunningStatistics:
        """Make the statistics of no tile."""
        # Three fills for seven tensors, each of which begins at a multiple of 16 bytes.
        padded = -(-num_rows // 4) * 4
        lowest = torch.full((3, padded), float("-inf"), dtype=torch.float32, device=device)
        sums = torch.zeros(2, padded, dtype=torch.float32, device=device)
        ids = torch.zeros(2, padded, dtype=torch.int64, device=device)
        maximum, best, drawn = lowest[:, :num_rows]
        total, weighted = sums[:, :num_rows]
        argmax, candidate = ids[:, :num_rows]
        return RunningStatistics(maximum, total, weighted, argmax, best, candidate, drawn)

    def rows(self, some: slice) -> RunningStatistics:
        """Select the statistics of some rows, which share their memory with these."""
        return RunningStatistics(*(getattr(self, field.name)[some] for field in fields(self)))

    def entropy(self) -> Tensor:
        """[num_rows], float32, nats, of softmax(x); 0 where no id is possible."""
        total = torch.where(self.total > 0, self.total, 1.0)
        # Rounding can leave a row of one possible token a hair below zero.
        return (total.log() - self.weighted / total).clamp(min=0.0)

    def confidence(self) -> Tensor:
        """[num_rows], float32: probability of the argmax; 0 where no id is possible."""
        return torch.where(self.total > 0, 1.0 / self.total, 0.0)

    def drawn_confidence(self) -> Tensor:
        """[num_rows], float32: probability of the candidate; 0 where no id is possible.

        At the schedule's temperature alone, and bit for bit :meth:`confidence` where the candidate
        is the argmax.
        """
        return drawn_share(self.drawn, self.maximum, self.total)

    def packed(self) -> Tensor:
        """[num_rows, 7], float32, for :meth:`merge`; ids below 2**24 survive it exactly."""
        return torch.stack(
            [
                self.maximum,
                self.total,
                self.weighted,
                self.argmax.float(),
                self.best,
                self.candidate.float(),
                self.drawn,
            ],
            dim=-1,
        )

    @staticmethod
    def merge(packed: Tensor) -> RunningStatistics:
        """Statistics of a whole vocabulary from those of its parts.

        Args:
            packed: [num_parts, num_rows, 7], float32, in ascending order of ids.
        """
        maximum, total, weighted, argmax, best, candidate, drawn = packed.unbind(-1)
        first = maximum.argmax(dim=0, keepdim=True)
        largest = maximum.gather(0, first)
        nothing = maximum == float("-inf")
        below = torch.where(nothing, 0.0, maximum - largest)
        scale = torch.where(nothing, 0.0, below.exp())
        winner = best.argmax(dim=0, keepdim=True)
        return RunningStatistics(
            maximum=largest[0],
            total=(total * scale).sum(dim=0),
            weighted=(scale * (weighted + total * below)).sum(dim=0),
            argmax=argmax.gather(0, first)[0].long(),
            best=best.gather(0, winner)[0],
            candidate=candidate.gather(0, winner)[0].long(),
            drawn=drawn.gather(0, winner)[0],
        )


def drawn_share(drawn: Tensor, maximum: Tensor, total: Tensor) -> Tensor:
    """The part of a row's mass that its drawn id holds.

    Args:
        drawn: [num_rows], float32: scaled logit of the drawn id.
        maximum: [num_rows], float32: largest of the scaled logits.
        total: [num_rows], float32: sum of exp(scaled logit - maximum) over the possible ids.

    Returns:
        [num_rows], float32; 0 where no id is possible.
    """
    return torch.where(total > 0, (drawn - maximum).exp() / total, 0.0)
