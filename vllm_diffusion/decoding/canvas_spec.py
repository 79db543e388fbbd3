"""Description of a family's canvases, with the defaults of requests and a pass's statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_diffusion.decoding.layouts import CanvasLayout
from vllm_diffusion.decoding.rule import RULE, DecodingRule
from vllm_diffusion.decoding.statistics import PositionStatistics

_FINAL = "is not supported by this model, which cannot revise a token that a canvas starts from; leave it out."


@dataclass(frozen=True)
class CanvasSpec:
    """Description of canvases, made at start-up for API process, scheduler and workers.

    Attributes:
        layout: Layout of canvases in a sequence.
        rule: Rule that decides which tokens a step keeps, and when a canvas is done.
        max_denoising_steps: N, the step cap, also the largest that a request may ask for.
        settings: Default settings of the rule, by name.
        mask_token_id: Token of undecided positions, never drawn in a canvas; ``None`` for uniformly
            random tokens.
        drafts: Description of the canvases of requests whose setting ``rule`` is not the first one,
            and which are verified; ``None`` where no request chooses.
        ways: Names of the rules that requests choose from; of one rule where none chooses.
        end_texts: Texts of tokens that end an answer, besides those of ``generation_config.json``
            and of the tokenizer.
    """

    layout: CanvasLayout
    rule: DecodingRule
    max_denoising_steps: int
    settings: Mapping[str, float | str]
    mask_token_id: int | None = None
    drafts: CanvasSpec | None = None
    ways: tuple[str, ...] = ("",)
    end_texts: tuple[str, ...] = ()

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

    def num_given(self, num_known: int) -> int:
        """Return how many leading positions of the canvas after ``num_known`` tokens are known
        too.
        """
        return self.layout.num_given(num_known)

    def all_settings(self, own: Mapping[str, float | str]) -> dict[str, float | str]:
        """Return the settings of a request: its own, and the server's for those that it leaves
        out.
        """
        return {**self.settings, **own}

    def way(self, own: Mapping[str, float | str]) -> int:
        """Return the index in ``ways`` of a request's rule: 0 where no request chooses.

        Args:
            own: Settings of the rule that the request brings, by name.
        """
        if self.drafts is None:
            return 0
        return self.ways.index(str(own.get(RULE, self.settings[RULE])))

    def of_way(self, way: int) -> CanvasSpec:
        """Return the description of the canvases of requests of a way, an index in ``ways``."""
        return self.drafts if way and self.drafts is not None else self

    def of_request(self, own: Mapping[str, float | str]) -> CanvasSpec:
        """Return the description of a request's canvases, by the settings that it brings."""
        return self.of_way(self.way(own))

    @property
    def seeded_layout(self) -> CanvasLayout | None:
        """Layout of canvases that begin with a token which the encoding pass draws; ``None`` if
        none do.
        """
        layout = self.layout if self.drafts is None else self.drafts.layout
        return layout if layout.is_seeded else None

    def block_length(self, settings: Mapping[str, float | str]) -> int:
        """Return how many positions of a request's canvas are denoised at a time.

        Args:
            settings: Settings of the rule that the request brings, by name.
        """
        return int(self.all_settings(settings).get("block_length", self.length))

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """Token ids that no position draws; a verifying pass may draw any token."""
        if self.mask_token_id is None or self.layout.verifies:
            return ()
        return (self.mask_token_id,)

    @property
    def refused_arguments(self) -> Mapping[str, str]:
        """The ``diffusion_*`` arguments that are not supported, without that prefix, each with the
        reason and the remedy.
        """
        refused = self.layout.refused_arguments
        if not self.marks_undecided or self.rule.revises:
            return refused
        return {"prediction": _FINAL, **refused}

    def refused_fields(self) -> dict[str, str]:
        """Return the request fields that are not supported, each with the reason and the remedy."""
        return {**self.layout.refused_fields, **self.rule.refused_fields}

    def converges_at_end(self, is_requested: bool) -> bool:
        """Return true if a canvas is judged by its positions up to its first end token only.

        Args:
            is_requested: Setting ``converge_at_end`` of the server.
        """
        return is_requested or self.rule.judges_to_end

    def statistics(self, num_slots: int, device: torch.device) -> PositionStatistics:
        """Allocate the statistics that the rule decides from.

        Args:
            num_slots: R.
            device: Where the tensors are.
        """

        def zeros(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(num_slots, self.length, *width, dtype=dtype, device=device)

        num_likeliest, num_named = self.rule.num_choices, len(self.rule.named_tokens)
        return PositionStatistics(
            argmax=zeros(torch.int64),
            candidate=zeros(torch.int64),
            entropy=zeros(torch.float32),
            drawn_confidence=zeros(torch.float32),
            confidence=zeros(torch.float32) if num_likeliest else None,
            choices=zeros(torch.int64, num_likeliest) if num_likeliest else None,
            margin=zeros(torch.float32) if self.rule.judges_filtered else None,
            named=zeros(torch.float32, num_named) if num_named else None,
        )
