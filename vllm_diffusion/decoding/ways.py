"""The ways of a server to make tokens, of which each request has one from its admission on.

A server has one way, or as many as its setting ``rules`` names. Requests, scheduler and host code
of a pass ask a request's :class:`Way`; on the device :class:`WayOfSlots` chooses by slot between
what the ways give.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from vllm_diffusion.decoding.layouts import CanvasLayout
from vllm_diffusion.decoding.rule import DecodingRule

Part = TypeVar("Part", bound=Hashable)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Way:
    """How the tokens of a request are made.

    Attributes:
        name: Value of ``diffusion_rule`` that chooses it.
        layout: Layout of its canvases in a sequence. All ways of a server agree on where canvases
            lie; they differ in what rows draw, and in what a canvas emits.
        rule: Rule that decides which tokens a step keeps, and when a canvas is done.
        max_denoising_steps: N, the step cap, also the largest that a request may ask for.
        denoises: False where a canvas is one token, the certain one: no step denoises it, and its
            commit draws the next token (``autoregressive``).
    """

    name: str
    layout: CanvasLayout
    rule: DecodingRule
    max_denoising_steps: int
    denoises: bool = True

    @property
    def length(self) -> int:
        """Positions of its canvases at most."""
        return self.layout.length if self.denoises else 1

    @property
    def refused_fields(self) -> dict[str, str]:
        """The request fields that it cannot honour, each with the reason and the remedy."""
        return {**self.layout.refused_fields, **self.rule.refused_fields}


class WayOfSlots:
    """The way of each slot's request, on the device; of a server's only way nothing is kept.

    Attributes:
        index: [R], int32, place of each slot's way among the server's; ``None`` if there is one.
    """

    def __init__(self, ways: Sequence[Way], num_slots: int, device: torch.device) -> None:
        self._ways = ways
        self.index = (
            torch.zeros(num_slots, dtype=torch.int32, device=device) if len(ways) > 1 else None
        )

    def fact(self, of: Callable[[Way], bool], slot: Tensor | None = None) -> bool | Tensor:
        """Tell of which slots something holds by their way.

        Args:
            of: The fact about a way.
            slot: [n], int64, the slots that are asked for; ``None`` for all.

        Returns:
            [n] or [R], bool; the fact itself where it is the same for all ways.
        """
        facts = [of(way) for way in self._ways]
        if all(facts) or not any(facts) or self.index is None:
            return facts[0]
        index = self.index if slot is None else self.index[slot]
        first, last = facts.index(True), len(facts) - 1 - facts[::-1].index(True)
        if all(facts[first:]):
            return index >= first
        if all(facts[: last + 1]):
            return index <= last
        those = [i for i, holds in enumerate(facts) if holds]
        return torch.stack([index == i for i in those]).any(dim=0)

    def choose(
        self,
        part: Callable[[Way], Part],
        value: Callable[[Part], Value],
        slot: Tensor | None = None,
    ) -> Value:
        """Return of each slot what a part of its way gives, computed once for equal parts.

        Args:
            part: The part of a way.
            value: What it gives: a tensor whose first dimension are the slots, or a mapping or
                tuple of such tensors.
            slot: [n], int64, the slots of that dimension; ``None`` for all.
        """
        first, *others = dict.fromkeys(map(part, self._ways))
        chosen = value(first)
        for other in others:
            is_its = self.fact(lambda way, other=other: part(way) == other, slot)  # type: ignore[misc]
            chosen = _where(is_its, value(other), chosen)
        return chosen


def holding(fact: bool | Tensor, values: Tensor) -> Tensor:
    """Return boolean values where a fact of :meth:`WayOfSlots.fact` holds, and false elsewhere."""
    if isinstance(fact, bool):
        return values if fact else torch.zeros_like(values)
    return values & fact


def _where(is_its: Any, own: Any, other: Any) -> Any:
    if isinstance(own, Mapping):
        return {name: _where(is_its, own[name], other[name]) for name in other}
    if isinstance(own, tuple):
        both = [_where(is_its, *pair) for pair in zip(own, other, strict=True)]
        return own._make(both) if hasattr(own, "_make") else tuple(both)
    if own is None and other is None:
        return None
    return torch.where(is_its.view(-1, *[1] * (own.dim() - 1)), own, other)
