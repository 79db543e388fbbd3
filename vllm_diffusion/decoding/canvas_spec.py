"""Description of a family's canvases, with the defaults of requests and a pass's statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vllm_diffusion.decoding.layouts import CanvasLayout
from vllm_diffusion.decoding.rule import Choice, DecodingRule, PositionStatistics, Setting, Values
from vllm_diffusion.decoding.ways import Way

_FINAL = "is not supported by this model, which cannot revise a token that a canvas starts from; leave it out."


@dataclass(frozen=True)
class CanvasSpec:
    """Description of canvases, made at start-up for API process, scheduler and workers.

    Attributes:
        ways: The ways to make tokens that requests choose from, the family's own first.
        settings: Default settings of the rules, by name.
        default_way: Place in ``ways`` of the one of requests that choose none.
        mask_token_id: Token of undecided positions, never drawn in a canvas; ``None`` for uniformly
            random tokens.
        noise_tokens: Ids of those random tokens, in order; ``None`` for the whole vocabulary.
        end_texts: Texts of tokens that end an answer, besides those of ``generation_config.json``
            and of the tokenizer.
        closing: Tokens that stand after each answer and its suffix while it is written.
    """

    ways: tuple[Way, ...]
    settings: Values
    default_way: int = 0
    mask_token_id: int | None = None
    noise_tokens: range | None = None
    end_texts: tuple[str, ...] = ()
    closing: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        layout: CanvasLayout,
        rule: DecodingRule,
        max_denoising_steps: int,
        settings: Values,
        *,
        name: str = "",
        **others: Any,
    ) -> CanvasSpec:
        """Describe canvases of one way, by the attributes of :class:`Way`."""
        return cls((Way(name, layout, rule, max_denoising_steps),), settings, **others)

    @cached_property
    def layout(self) -> CanvasLayout:
        """Layout that tells where canvases lie, which is the same for all ways."""
        return self.ways[0].layout

    @property
    def rules(self) -> tuple[DecodingRule, ...]:
        """The rules of the ways, each once."""
        return tuple(dict.fromkeys(way.rule for way in self.ways))

    @property
    def rule_settings(self) -> dict[str, Setting | Choice]:
        """The settings of all rules, by name."""
        return {name: each for rule in self.rules[::-1] for name, each in rule.settings.items()}

    @property
    def presets(self) -> dict[str, Values]:
        """The presets of all rules, by name."""
        return {name: each for rule in self.rules[::-1] for name, each in rule.presets.items()}

    @property
    def way_names(self) -> Choice | None:
        """The names of the ways to choose from; ``None`` if there is one."""
        names = tuple(way.name for way in self.ways)
        return Choice(names, "how the tokens of a request are made") if len(names) > 1 else None

    @property
    def max_denoising_steps(self) -> int:
        """N, the largest step cap of a way."""
        return max(way.max_denoising_steps for way in self.ways)

    @property
    def named_tokens(self) -> tuple[int, ...]:
        """Token ids whose probabilities the steps need, in the order of the statistics."""
        return tuple(dict.fromkeys(chain.from_iterable(rule.named_tokens for rule in self.rules)))

    @property
    def length(self) -> int:
        """Canvas length C: positions that are denoised together."""
        return self.layout.length

    @property
    def marks_undecided(self) -> bool:
        """True if a position without a token holds the mask, and every other one keeps what was
        drawn for it.

        Otherwise it holds noise like any token, and each step writes all positions anew.
        """
        return self.mask_token_id is not None

    @cached_property
    def _block_length(self) -> int:
        return int(self.settings.get("block_length", self.length))

    def room(self, num_prompt: int) -> int:
        """Return the most tokens of an answer, where a canvas holds it whole."""
        return self.length - num_prompt - len(self.closing)

    def num_given(self, num_known: int) -> int:
        """Return how many leading positions of the canvas after ``num_known`` tokens are known
        too.
        """
        return self.layout.num_given(num_known)

    def all_settings(self, own: Values) -> dict[str, float | str]:
        """Return the settings of a request: its own, and the server's for those that it leaves
        out.
        """
        return {**self.settings, **own}

    def block_length(self, settings: Values) -> int:
        """Return how many positions of a request's canvas are denoised at a time.

        Args:
            settings: Settings of the rule that the request brings, by name.
        """
        # The scheduler asks several times for each request of a pass.
        return int(settings.get("block_length", self._block_length))

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """Token ids that no position draws; a verifying pass may draw any token."""
        if self.mask_token_id is None or self.layout.verifies:
            return ()
        return (self.mask_token_id,)

    def refused_arguments(self, way: Way) -> Mapping[str, str]:
        """Return the ``diffusion_*`` arguments that a way cannot honour, without that prefix, each
        with the reason and the remedy.
        """
        refused = way.layout.refused_arguments
        if not self.marks_undecided or way.rule.revises:
            return refused
        return {"prediction": _FINAL, **refused}

    def statistics(self, num_slots: int, device: torch.device) -> PositionStatistics:
        """Allocate the statistics that the rule decides from.

        Args:
            num_slots: R.
            device: Where the tensors are.
        """

        def zeros(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(num_slots, self.length, *width, dtype=dtype, device=device)

        rules, num_named = self.rules, len(self.named_tokens)
        num_likeliest = max(rule.num_choices for rule in rules)
        return PositionStatistics(
            argmax=zeros(torch.int64),
            candidate=zeros(torch.int64),
            entropy=zeros(torch.float32),
            drawn_confidence=zeros(torch.float32),
            confidence=zeros(torch.float32) if num_likeliest else None,
            choices=zeros(torch.int64, num_likeliest) if num_likeliest else None,
            margin=zeros(torch.float32) if any(rule.judges_filtered for rule in rules) else None,
            named=zeros(torch.float32, num_named) if num_named else None,
        )
