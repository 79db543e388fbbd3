"""Logits of rows as a model projected them, and what turns them into those of a distribution.

Nothing here is as wide as the vocabulary twice: the projected logits stay in the model's dtype, and
what requests ask of them is applied wherever they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Logit of an id that a mask allows and that was impossible before: a mask comes before a bias or a
# penalty that leaves it nothing. Nothing next to any other id, and yet possible where nothing else
# is.
LAST_RESORT = -1e4
# What fills up a list of ids.
NO_ID = 2**31 - 1
# Probabilities relative to the likeliest id in fixed point: 2**23 of them fit into 63 bits.
MASS_SCALE = 2.0**40


class LogitAdjustments(NamedTuple):
    """Adjustments of the logits of rows by their requests, applied in this order.

    Tables have a row for each request with the adjustment; those of penalties and masks a column
    (or a bit) for each id of the whole vocabulary. An index of -1 means no adjustment; an unused
    table may have no rows.

    Attributes:
        list_idx: [num_rows], int32, into the next three.
        listed_ids: [num_lists, N], int32: ids, ascending, filled up with ``NO_ID``; N is a power of
            two, and the last place is ``NO_ID``.
        listed_offsets: [num_lists, N], float32: added to their logits; minus infinity forbids an
            id.
        other_offsets: [num_lists], float32: added to the logits of all other ids.
        penalty_idx: [num_rows], int32, into the next five.
        repetition: [num_tables], float32: of ids in the prompt or the answer, positive logits are
            divided by it and others multiplied.
        frequency: [num_tables], float32: subtracted as often as an id is in the answer.
        presence: [num_tables], float32: subtracted once if it is.
        prompt_mask: [num_tables, ceil(vocab_size / 32)], int32: a bit for each id in the prompt.
        output_counts: [num_tables, vocab_size], int32: how often an id is in the answer.
        mask_idx: [num_rows], int32, into ``masks``.
        masks: [num_masks, ceil(vocab_size / 32)], int32: a bit for each id that is allowed, at a
            logit of at least ``LAST_RESORT``.
        pin: [num_rows], int32: the row's only id, possible whatever was said before.
    """

    list_idx: Tensor
    listed_ids: Tensor
    listed_offsets: Tensor
    other_offsets: Tensor
    penalty_idx: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    prompt_mask: Tensor
    output_counts: Tensor
    mask_idx: Tensor
    masks: Tensor
    pin: Tensor

    def rows(self, some: slice | Tensor) -> LogitAdjustments:
        """Select the adjustments of some rows."""
        return self._replace(
            list_idx=self.list_idx[some],
            penalty_idx=self.penalty_idx[some],
            mask_idx=self.mask_idx[some],
            pin=self.pin[some],
        )

    def apply(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Adjusted logits, a new tensor.

        Args:
            logits: [num_rows, num_ids], float32.
            ids: [num_ids], int64, ascending: whose logits these are.
        """
        if len(self.listed_ids) > 0:
            logits = logits + self._offsets(ids)
        if len(self.output_counts) > 0:
            logits = self._penalised(logits, ids)
        if len(self.masks) > 0:
            row = self.mask_idx.long()[:, None]
            allowed = _bits(self.masks, row.clamp(min=0), ids)
            masked = torch.where(allowed, logits.clamp(min=LAST_RESORT), float("-inf"))
            logits = torch.where(row >= 0, masked, logits)
        pin = self.pin[:, None]
        pinned = torch.where(ids == pin, 0.0, float("-inf"))
        return torch.where(pin >= 0, pinned, logits)

    def _offsets(self, ids: Tensor) -> Tensor:
        """[num_rows, num_ids], float32: what is added to each logit."""
        row, num_ids = self.list_idx.long(), len(ids)
        listed = self.listed_ids.long()
        column = torch.searchsorted(ids, listed).clamp(max=num_ids - 1)
        # What is not among these ids goes to a column that is cut off.
        column = torch.where(ids[column] == listed, column, num_ids)
        offsets = self.other_offsets[:, None].repeat(1, num_ids + 1)
        offsets.scatter_(1, column, self.listed_offsets)
        return torch.where(row[:, None] >= 0, offsets[row.clamp(min=0), :num_ids], 0.0)

    def _penalised(self, logits: Tensor, ids: Tensor) -> Tensor:
        row = self.penalty_idx.long()[:, None]
        table = row.clamp(min=0)
        counts = self.output_counts[table, ids]
        in_answer = counts > 0
        seen = in_answer | _bits(self.prompt_mask, table, ids)
        repetition = self.repetition[table]
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        penalised = torch.where(seen, scaled, logits)
        penalised = penalised - self.frequency[table] * counts - self.presence[table] * in_answer
        return torch.where(row >= 0, penalised, logits)


def _bits(bit_masks: Tensor, row: Tensor, ids: Tensor) -> Tensor:
    return (bit_masks[row, ids >> 5] >> (ids & 31)) & 1 == 1


class RowLogits(NamedTuple):
    """Some ids of some rows.

    Attributes:
        projected: [num_rows, num_ids], floating point: what the output head returned. Without a
            cap, an id at minus infinity is impossible.
        first_id: The first of the ids.
        softcap: Logits become ``softcap * tanh(logit / softcap)`` in float32 first; ``None``
            leaves them.
        adjustments: Applied to what comes out; ``None`` if nobody asks for any.
    """

    projected: Tensor
    first_id: int
    softcap: float | None = None
    adjustments: LogitAdjustments | None = None

    def scaled(self, divisor: Tensor) -> Tensor:
        """[num_rows, num_ids], float32: capped, adjusted and divided by ``divisor`` [num_rows]."""
        logits = self.projected.float()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.adjustments is not None:
            num_ids, device = logits.shape[1], logits.device
            ids = torch.arange(self.first_id, self.first_id + num_ids, device=device)
            logits = self.adjustments.apply(logits, ids)
        return logits / divisor[:, None]

    def rows(self, some: slice | Tensor) -> RowLogits:
        """Select the logits of some rows."""
        adjustments = None if self.adjustments is None else self.adjustments.rows(some)
        return self._replace(projected=self.projected[some], adjustments=adjustments)

    def tiles(self, size: int) -> Iterator[RowLogits]:
        """The ids in pieces of at most ``size``."""
        for start in range(0, self.projected.shape[1], size):
            yield self._replace(
                projected=self.projected[:, start : start + size], first_id=self.first_id + start
            )


def ordered_keys(values: Tensor) -> Tensor:
    """int64 in [-2**31, 2**31) that compare as the float32 ``values`` do; both zeros are one."""
    bits = (values + 0.0).view(torch.int32)
    # All bits but the sign are turned over where it is set.
    return (bits ^ ((bits >> 31) & (2**31 - 1))).long()
