"""Rule of RND1, which reveals masks anywhere in the answer by their entropy, in even steps."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vllm_diffusion.decoding.rule import Choice, Setting, StepDecision, StepInputs
from vllm_diffusion.decoding.timed_reveal import ScheduledReveal

# The temperature of a request at temperature 0, as in the source.
_LEAST_TEMPERATURE = 1e-8
_CLOSED = (
    "is not supported by this model, whose answers have a fixed length before a padding token; "
    "leave it out."
)


class EntropySchedule(ScheduledReveal):
    """Reveal the masks of least entropy in N equal steps.

    After step j of N, (N - j) / N of the answer's masks are left, rounded down: those of the
    largest entropies, which are taken at the request's temperature. Among equals the leftmost is
    revealed first. At temperature 0 entropies are those at 1e-8, all 0 unless two tokens are
    equally likely, so that an answer is written from left to right.

    Source: ``diffusion_sample`` of ``rnd/sampling.py`` of RadicalNumerics/RND1 at 87d5f46.
    """

    settings: Mapping[str, Setting | Choice] = {}
    refused_fields: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("structured_outputs", "bad_words", "thinking_token_budget"), _CLOSED
    )

    def temperatures(
        self,
        settings: Mapping[str, Tensor],
        step: Tensor,
        max_steps: Tensor,
        requested: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return requested.clamp(min=_LEAST_TEMPERATURE), (requested > 0).to(requested.dtype)

    def decide(
        self, inputs: StepInputs, settings: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> StepDecision:
        free = inputs.valid & ~inputs.fixed
        masked = (inputs.canvas == self.mask_token_id) & free
        num_masks, total = masked.sum(dim=-1), free.sum(dim=-1)
        num_steps = inputs.max_steps.long()

        def num_kept(steps_left: Tensor) -> Tensor:
            # In float32, as in the source.
            return (total.float() * (steps_left.float() / num_steps.float())).long()

        # The next step that reveals a mask: about here, and rounding may shift it by one.
        steps_left = torch.minimum(
            num_steps - 1 - memory["time"], num_masks * num_steps // total.clamp(min=1) + 1
        ).clamp(min=0)
        for _ in range(3):
            is_idle = (num_kept(steps_left) >= num_masks) & (steps_left > 0)
            steps_left = torch.where(is_idle, steps_left - 1, steps_left)

        ranks = self._ranks(-inputs.predicted.entropy, masked)
        chosen = ranks < (num_masks - num_kept(steps_left))[:, None]
        return self._reveal(inputs, masked, chosen, num_steps - steps_left)
