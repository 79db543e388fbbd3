"""Rule of models that attend over the whole sequence: the answer is revealed block by block."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_diffusion.decoding.reveal import STRATEGIES, Reveal
from vllm_diffusion.decoding.rule import Choice, Setting, StepDecision, StepInputs

RANDOM = "random"
_STRATEGIES = (*STRATEGIES, RANDOM)


class RevealInBlocks(Reveal):
    """Rule :class:`Reveal` in the first ``block_length`` positions that are not known.

    The positions after them stay masked, and are attended. When nothing in the block is masked it is
    emitted, and the next one begins. Another strategy, ``random``, reveals n[s] masks that are drawn.

    Source: ``generate`` of ML-GSAI/LLaDA, ``generate.py`` at b7e6c35.
    """

    settings = {
        **Reveal.settings,
        "strategy": Choice(
            _STRATEGIES, f"{Reveal.settings['strategy'].meaning}; `random` draws them"
        ),
        "block_length": Setting(
            int, 1, 2**20, "positions of the answer that are denoised before those after them"
        ),
    }

    draws_positions = True

    def decide(
        self, inputs: StepInputs, settings: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> StepDecision:
        # Nothing is pinned, so that fixed positions are the known tokens.
        end = inputs.fixed.sum(dim=-1, dtype=torch.int32) + settings["block_length"]
        position = torch.arange(inputs.canvas.shape[-1], device=end.device)
        in_reach = position < end[:, None]
        assert inputs.uniform is not None
        is_random = settings["strategy"][:, None] == _STRATEGIES.index(RANDOM)
        within = inputs._replace(
            valid=inputs.valid & in_reach,
            drawn_confidence=torch.where(is_random, inputs.uniform, inputs.drawn_confidence),
        )
        decision = super().decide(within, settings, memory)
        return decision._replace(
            keep=decision.keep & in_reach,
            num_final=torch.minimum(end, inputs.valid.sum(dim=-1, dtype=torch.int32)),
        )
