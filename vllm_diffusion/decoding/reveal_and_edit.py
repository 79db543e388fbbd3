"""LLaDA2.1's rule: reveal confident tokens, and rewrite tokens that the model now rejects."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.decoding.rule import Memory, StepDecision, StepInputs
from vllm_diffusion.decoding.settings import Setting


class RevealAndEdit(Reveal):
    """Rule :class:`Reveal` with steps that also rewrite revealed tokens.

    A token is rewritten if the step draws another one with a probability above
    ``editing_threshold``: a threshold of 0 rewrites every token that differs. A canvas is done with
    a step that found no mask and changed nothing: it ran on the final tokens, so its keys and
    values are final. It is also done when ``max_post_steps`` steps found no mask, whatever they
    changed.

    Source: ``generate`` of ``modeling_llada2_moe.py`` of inclusionAI/LLaDA2.1-mini.
    """

    settings = {
        **Reveal.settings,
        "editing_threshold": Setting(
            float, 0.0, 1.0, "a revealed token is rewritten by another with a probability above it"
        ),
        "max_post_steps": Setting(
            int, 0, 10_000, "a canvas ends after as many steps that found no mask"
        ),
    }
    # The two modes of the README.
    presets = {
        "quality": {"reveal_threshold": 0.7, "editing_threshold": 0.5},
        "speed": {"reveal_threshold": 0.5, "editing_threshold": 0.0},
    }
    # Number of steps that found no mask.
    memory = {"post_steps": Memory(torch.int32)}
    can_finish_kv = True

    def decide(
        self, inputs: StepInputs, settings: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> StepDecision:
        masked = self.masked(inputs)
        reveal = self.revealed(inputs, settings, masked, self.num_least(inputs, masked))
        edit = inputs.valid & ~inputs.fixed & ~masked & (inputs.candidate != inputs.canvas)
        edit = edit & (inputs.drawn_confidence > settings["editing_threshold"][:, None])
        tokens = torch.where(masked | edit, inputs.candidate, inputs.canvas)
        decided = reveal | ~masked
        counted = inputs.counted(tokens, decided)
        found_none = ~(masked & counted).any(dim=-1)
        repeats = found_none & ~(edit & counted).any(dim=-1)
        post_steps = memory["post_steps"] + found_none.to(torch.int32)
        leaves_none = ~(~decided & counted).any(dim=-1)
        is_last = leaves_none & (post_steps >= settings["max_post_steps"])
        return StepDecision(
            keep=decided,
            tokens=tokens,
            result=tokens,
            done=repeats | is_last,
            memory={"post_steps": post_steps},
            # Behind an end token anything may have changed.
            has_final_kv=repeats & ~((reveal | edit) & inputs.valid).any(dim=-1),
        )
