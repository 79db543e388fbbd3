"""Rule of models that attend over the whole sequence: the answer is revealed block by block."""

from typing import Any

import torch
from torch import Tensor

from vllm_diffusion.decoding.reveal import STRATEGIES, Reveal
from vllm_diffusion.decoding.rule import (
    FLOAT32_MIN,
    Choice,
    Setting,
    StepDecision,
    StepInputs,
    Tensors,
    Values,
)

RANDOM = "random"
_STRATEGIES = (*STRATEGIES, RANDOM)


class RevealInBlocks(Reveal):
    """Rule :class:`Reveal` in the first ``block_length`` positions that are not known.

    The positions after them stay masked, and are attended. When nothing in the block is masked it
    is emitted, and the next one begins. Another strategy, ``random``, reveals n[s] masks that are
    drawn.

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

    def read(self, canvas: Tensor, num_known: Tensor, settings: Tensors) -> Tensor | None:
        is_mask = super().read(canvas, num_known, settings)
        return None if is_mask is None else is_mask & self._in_reach(canvas, num_known, settings)[0]

    @staticmethod
    def _in_reach(canvas: Tensor, num_known: Tensor, settings: Tensors) -> tuple[Tensor, Tensor]:
        """Positions up to the end of the block, [R, C], bool, and that end, [R], int32."""
        end = num_known + settings["block_length"]
        position = torch.arange(canvas.shape[-1], device=end.device)
        return position < end[:, None], end

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        num_known = inputs.known.sum(dim=-1, dtype=torch.int32)
        in_reach, end = self._in_reach(inputs.canvas, num_known, settings)
        assert inputs.uniform is not None
        is_random = settings["strategy"][:, None] == _STRATEGIES.index(RANDOM)
        confidence = torch.where(is_random, inputs.uniform, inputs.predicted.drawn_confidence)
        within = inputs.with_predicted(drawn_confidence=confidence)
        within = within._replace(valid=inputs.valid & in_reach)
        decision = super().decide(within, settings, memory)
        return decision._replace(
            keep=decision.keep & in_reach,
            num_final=torch.minimum(end, inputs.valid.sum(dim=-1, dtype=torch.int32)),
        )


class RevealEndsLast(RevealInBlocks):
    """Rule :class:`RevealInBlocks` with options that hold end tokens back.

    With ``logits_eos_inf`` the end token is never drawn. With ``confidence_eos_eot_inf`` tokens are
    drawn as without it, and confidences are probabilities without the end of the turn, at
    temperature 0 without the end token too: such tokens are revealed last.

    Source: ``generate`` of ML-GSAI/LLaDA, ``generate.py`` at b7e6c35. That temperature 0 makes a
    difference is how it acts there: noised and plain logits are then the same tensor.
    """

    settings = {
        **RevealInBlocks.settings,
        "logits_eos_inf": Setting(int, 0, 1, "1 never draws the end token"),
        "confidence_eos_eot_inf": Setting(int, 0, 1, "1 reveals end tokens last"),
    }
    defaults = {**RevealInBlocks.defaults, "logits_eos_inf": 0, "confidence_eos_eot_inf": 0}

    def __init__(
        self, mask_token_id: int, *, end_token_id: int, turn_end_token_id: int, **options: Any
    ) -> None:
        """Set the options that a family fixes.

        Args:
            mask_token_id: Token of positions that are not revealed.
            end_token_id: Token that ends an answer.
            turn_end_token_id: Token that ends a turn.
            options: Of :class:`Reveal`.
        """
        super().__init__(mask_token_id, **options)
        self.named_tokens = (end_token_id, turn_end_token_id)

    def forbidden(self, values: Values) -> tuple[int, ...]:
        return self.named_tokens[:1] if values["logits_eos_inf"] else ()

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        predicted = inputs.predicted
        assert predicted.named is not None
        assert inputs.greedy is not None
        named = torch.tensor(self.named_tokens, device=inputs.canvas.device)
        # [R, 2]: named tokens that are left out of the distribution before confidences are taken.
        held_back = torch.stack([inputs.greedy, torch.ones_like(inputs.greedy)], dim=-1)
        held_back = held_back & (settings["confidence_eos_eot_inf"] > 0)[:, None]
        rest = 1 - torch.where(held_back[:, None], predicted.named, 0.0).sum(dim=-1)
        is_held = ((predicted.candidate[..., None] == named) & held_back[:, None]).any(dim=-1)
        confidence = (predicted.drawn_confidence / rest.clamp(min=FLOAT32_MIN)).clamp(max=1.0)
        confidence = torch.where(is_held, 0.0, confidence)
        any_held = held_back.any(dim=-1, keepdim=True)
        confidence = torch.where(any_held, confidence, predicted.drawn_confidence)
        return super().decide(inputs.with_predicted(drawn_confidence=confidence), settings, memory)


class RevealWithThoughts(RevealInBlocks):
    """Rule :class:`RevealInBlocks` of models whose thoughts are brought to an end as an answer
    grows.

    Source: ``var_generate`` of iLLaDA's ``generate.py``, as found in a public copy.
    """

    settings = {
        **RevealInBlocks.settings,
        "end_think_logit_boost": Setting(
            float, 0.0, 10_000.0, "added to the logit that ends a thought, at the end of the answer"
        ),
        "end_think_boost_power": Setting(
            float,
            0.0,
            100.0,
            "power of the part of `max_tokens` that is written, by which it grows",
        ),
    }
    defaults = {
        **RevealInBlocks.defaults,
        "end_think_logit_boost": 0.0,
        "end_think_boost_power": 2.0,
    }
    ends_thoughts = True
