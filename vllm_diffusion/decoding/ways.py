"""A rule whose requests choose their way: to have canvases denoised, or drafts verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.rule import RULE, Choice, DecodingRule, StepDecision, StepInputs


class RuleOfRequest(DecodingRule):
    """Decide each slot's canvas by the rule that its request names.

    ``autoregressive`` is a draft of one token, the certain one: no step denoises it, and its commit
    draws the next token.
    """

    def __init__(
        self, diffusion: DecodingRule, drafts: DecodingRule, names: tuple[str, ...]
    ) -> None:
        """Combine two rules.

        Args:
            diffusion: Rule of canvases that are not verified.
            drafts: Rule of drafts; its settings are among those of ``diffusion``.
            names: Values of the setting ``rule``, that of ``diffusion`` first.
        """
        self.diffusion = diffusion
        self.drafts = drafts
        self.settings = {
            **diffusion.settings,
            RULE: Choice(names, "how the tokens of a request are made"),
        }
        self.presets = diffusion.presets
        self.memory = {**drafts.memory, **diffusion.memory}
        self.judges_to_end = diffusion.judges_to_end

    def contradiction(
        self, values: Mapping[str, float | str]
    ) -> tuple[tuple[str, ...], str] | None:
        return self.diffusion.contradiction(values)

    def temperatures(
        self,
        settings: Mapping[str, Tensor],
        step: Tensor,
        max_steps: Tensor,
        requested: Tensor,
    ) -> tuple[Tensor, Tensor]:
        verified = settings[RULE] > 0
        judged, drawn = (
            torch.where(verified, *both)
            for both in zip(
                self.drafts.temperatures(settings, step, max_steps, requested),
                self.diffusion.temperatures(settings, step, max_steps, requested),
                strict=True,
            )
        )
        return judged, drawn

    def decide(
        self, inputs: StepInputs, settings: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> StepDecision:
        draft = self.drafts.decide(inputs, settings, memory)
        plain = self.diffusion.decide(inputs, settings, memory)
        verified = settings[RULE] > 0

        def chosen(drafted: Tensor, denoised: Tensor) -> Tensor:
            each = verified.view(-1, *[1] * (denoised.dim() - 1))
            return torch.where(each, drafted, denoised)

        return StepDecision(
            keep=chosen(draft.keep, plain.keep),
            tokens=chosen(draft.tokens, plain.tokens),
            result=chosen(draft.result, plain.result),
            done=chosen(draft.done, plain.done),
            memory={
                name: chosen(draft.memory.get(name, kept), plain.memory.get(name, kept))
                for name, kept in memory.items()
            },
        )


def by_request(
    diffusion: CanvasSpec, drafts: CanvasSpec, names: tuple[str, ...], default: str
) -> CanvasSpec:
    """Describe the canvases of a server whose requests choose their way.

    Args:
        diffusion: Of requests whose canvases are denoised.
        drafts: Of requests whose canvases are verified.
        names: The rules to choose from, that of ``diffusion`` first.
        default: The one of requests that choose none.
    """
    return replace(
        diffusion,
        rule=RuleOfRequest(diffusion.rule, drafts.rule, names),
        settings={**diffusion.settings, RULE: default},
        drafts=drafts,
        ways=names,
    )
