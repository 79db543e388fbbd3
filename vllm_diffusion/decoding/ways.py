"""The ways of a server to make tokens, of which each request has one from its admission on.

A server has one way, or as many as its setting ``rules`` names. Requests, scheduler and host code
of a pass ask a request's :class:`Way`; on the device :class:`WayOfSlots` chooses by slot between
what the ways give.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

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


@dataclass(frozen=True)
class PassOrder:
    """What the passes of a canvas do, which scheduler, model state and step read.

    A canvas takes its denoise steps, one a pass. After the last one its tokens are *emitted*: they
    go to the engine. Before another canvas can follow, its rows are *encoded*: they run as known
    tokens, which writes their final keys and values. A pass of its own that does so and emits the
    canvas is its *commit*.

    Attributes:
        commits: A canvas is emitted by a commit. Otherwise the step that converges emits it, and
            its tokens are encoded like a prompt's. There is a commit in the asynchronous order,
            which schedules the next pass before it is known whether a step converged, unless that
            pass runs the same rows anyhow; where that pass verifies a draft; and where a last step
            may itself leave final keys and values, and then takes the commit's place.
        commit_encodes: The commit encodes the canvas. Without it, no row of a canvas runs as a
            known token.
        prompt_with_step: The end of a prompt and the first step of its canvas share a pass. Not
            where a canvas begins with a token that the pass over the prompt draws, nor with back
            ends of vLLM's, which have one flag for all rows of a sequence: causal or not.
        encode_with_step: The encode of an emitted canvas and the first step of the next one share a
            pass, so that a canvas of N steps takes N passes. Not where ``prompt_with_step`` cannot
            be, nor where the canvas is known to have converged too late or may leave nothing to
            encode.
    """

    commits: bool
    commit_encodes: bool
    prompt_with_step: bool
    encode_with_step: bool

    @classmethod
    def of(cls, way: Way, *, is_async: bool, own_attention: bool) -> Self:
        """Derive the order.

        Args:
            way: The way of the request whose canvas it is.
            is_async: Passes are scheduled before the last one's output is known.
            own_attention: This package's back end attends, and not one of vLLM's.
        """
        needs_commit = is_async and not way.layout.recomputes
        commits = needs_commit or way.rule.can_finish_kv or way.layout.verifies
        shares = own_attention and not way.layout.draws_first_token
        return cls(
            commits=commits,
            commit_encodes=commits and not way.rule.can_finish_kv,
            prompt_with_step=shares,
            encode_with_step=shares and not is_async and not way.rule.can_finish_kv,
        )


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
