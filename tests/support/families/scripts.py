"""Models of a few lines, for loops whose passes are worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.families import run
from tests.support.families.model import scripted

VOCAB, MASK, END = 100, 4, 1
DELETE, SPLIT = 98, 99


def row(token: int, p: float, second: int | None = None) -> Tensor:
    """[VOCAB]: logits under which ``token`` has probability ``p``, and ``second`` all the rest.

    Without a second all other tokens share the rest; with ``p=0.5`` and a second both are exactly
    as likely, and the softmax is exact.
    """
    rest = (1 - p) / (VOCAB - 1)
    logits = torch.full((VOCAB,), math.log(rest) if second is None else float("-inf"))
    if second is not None:
        logits[second] = math.log(1 - p)
    logits[token] = math.log(p)
    return logits


def constant(rows: Sequence[Tensor]) -> run.Model:
    """A model that says the same at each position whatever stands there."""
    return scripted(lambda ids: torch.stack(list(rows[: len(ids)])))


def decreasing(length: int, *, first: float = 0.9, by: float = 0.05, token: int = 10) -> run.Model:
    """Position i says ``token + i``, each with less certainty than the one before."""
    return constant([row(token + i, first - by * i) for i in range(length)])


def blocks(result: run.Run, kind: str) -> list[int]:
    """Passes of that kind per block, in the order of the blocks."""
    starts = [one.start for one in result.passes if one.kind == kind]
    return [len(list(group)) for _, group in itertools.groupby(starts)]
