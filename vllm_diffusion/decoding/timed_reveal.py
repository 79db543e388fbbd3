"""Rules of models that reveal masks anywhere in the answer, by the steps of a schedule."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vllm_diffusion.decoding.rule import (
    FLOAT32_MIN,
    Choice,
    DecodingRule,
    Memory,
    Setting,
    StepDecision,
    StepInputs,
    Tensors,
    Values,
    places,
)

ORIGIN, MASKGIT_PLUS, TOPK_MARGIN, ENTROPY = ALGORITHMS = (
    "origin",
    "maskgit_plus",
    "topk_margin",
    "entropy",
)


class ScheduledReveal(DecodingRule):
    """Reveal masks anywhere in the answer by a schedule; a revealed token stays.

    A step of the schedule that reveals nothing is left out, so that no pass is run for it.
    """

    # Steps of the schedule that are over, those among them that were left out.
    memory = {"time": Memory(torch.int32)}
    judges_filtered = True

    def __init__(self, mask_token_id: int) -> None:
        """Set the mask token."""
        self.mask_token_id = mask_token_id

    def read(self, canvas: Tensor, num_known: Tensor, settings: Tensors) -> Tensor | None:
        return canvas == self.mask_token_id

    @staticmethod
    def _ranks(score: Tensor, masked: Tensor) -> Tensor:
        """[R, C], int64: place of each mask among those of its row, the largest score first, of
        equals the leftmost.
        """
        score = torch.where(masked, score, float("-inf"))
        return places(torch.sort(score, dim=-1, descending=True, stable=True).indices)

    @staticmethod
    def _reveal(inputs: StepInputs, masked: Tensor, chosen: Tensor, time: Tensor) -> StepDecision:
        """Decide for the chosen of the masks.

        Args:
            inputs: What the step is decided from.
            masked: [R, C], bool: masks that may be revealed.
            chosen: [R, C], bool; of other positions nothing is read.
            time: [R]: steps of the schedule that are over then.
        """
        decided = (masked & chosen) | ~masked
        tokens = torch.where(masked, inputs.predicted.candidate, inputs.canvas)
        return StepDecision(
            keep=decided,
            tokens=tokens,
            result=tokens,
            done=decided.all(dim=-1),
            memory={"time": time.to(torch.int32)},
        )


class TimedReveal(ScheduledReveal):
    """Reveal masks as time runs from 1 to ``eps`` in N equal steps; a revealed token stays.

    In the step from time t to s, M masks are left. ``maskgit_plus``, ``topk_margin`` and
    ``entropy`` reveal M (1 - s / t) of them, rounded down: the most probable ones, those whose
    likeliest token is furthest above the next, or those of least entropy; with ``alg_temp`` above 0
    positions drawn without replacement from the softmax of that confidence over it. ``origin``
    reveals each with probability 1 - s / t. The last step reveals all.

    Source: ``_sample`` of ``generation_utils.py`` of Dream, as ZHZisZZ/dllm has it at ca17675.
    """

    settings = {
        "algorithm": Choice(
            ALGORITHMS,
            "what a step reveals: any mask, the most probable, those whose likeliest token is furthest above "
            "the next, those of least entropy",
        ),
        "eps": Setting(float, FLOAT32_MIN, 0.5, "the time at which the last step ends"),
        "alg_temp": Setting(
            float, 0.0, 1000.0, "temperature of the choice of positions; 0 takes the best"
        ),
    }
    draws_positions = True

    def reads_margin(self, values: Values) -> bool:
        return values["algorithm"] == TOPK_MARGIN

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        assert inputs.uniform is not None
        masked = (inputs.canvas == self.mask_token_id) & inputs.valid & ~inputs.fixed
        num_masks = masked.sum(dim=-1)
        last = inputs.max_steps - 1
        is_origin = settings["algorithm"] == ALGORITHMS.index(ORIGIN)
        time = torch.where(
            is_origin,
            torch.minimum(memory["time"], last),
            self._next_busy(memory["time"], num_masks, settings["eps"], inputs.max_steps),
        )
        share = self._share(time, settings["eps"], inputs.max_steps)
        number = torch.where(time >= last, num_masks, (num_masks * share).long())

        predicted = inputs.predicted
        assert predicted.margin is not None
        algorithm = settings["algorithm"][:, None]
        score = torch.where(
            algorithm == ALGORITHMS.index(TOPK_MARGIN), predicted.margin, predicted.drawn_confidence
        )
        score = torch.where(algorithm == ALGORITHMS.index(ENTROPY), -predicted.entropy, score)
        heat = settings["alg_temp"][:, None]
        # The largest of scores with such noise are positions drawn without replacement.
        noise = -torch.log(-torch.log(inputs.uniform))
        score = torch.where(heat > 0, score / heat.clamp(min=FLOAT32_MIN) + noise, score)
        by_chance = (inputs.uniform < share[:, None]) | (time >= last)[:, None]
        by_rank = self._ranks(score, masked) < number[:, None]
        chosen = torch.where(is_origin[:, None], by_chance, by_rank)
        return self._reveal(inputs, masked, chosen, time + 1)

    @staticmethod
    def _share(time: Tensor, eps: Tensor, num_steps: Tensor) -> Tensor:
        """[R], float32: 1 - s / t of a step, in float32 as in the source.

        Args:
            time: [R], int32, which step of the schedule.
            eps: [R], float32.
            num_steps: [R], int32, N.
        """

        def at(index: Tensor) -> Tensor:
            # As torch.linspace(1, eps, N + 1) has it.
            width = (eps - 1) / num_steps
            is_early = index < (num_steps + 1) // 2
            return torch.where(is_early, 1 + width * index, eps - width * (num_steps - index))

        return 1 - at(time + 1) / at(time)

    def _next_busy(self, time: Tensor, num_masks: Tensor, eps: Tensor, num_steps: Tensor) -> Tensor:
        """[R], int32: the first step from ``time`` on that reveals a mask, N - 1 at most."""
        last = num_steps - 1
        # M (1 - s / t) is 1 about here; rounding may shift it by one.
        first = (num_steps / (1 - eps) - num_masks).floor().to(torch.int32) - 1
        time = torch.minimum(torch.maximum(time, first), last)
        for _ in range(3):
            is_idle = num_masks * self._share(time, eps, num_steps) < 1
            time = torch.where(is_idle & (time < last), time + 1, time)
        return time


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
        settings: Tensors,
        step: Tensor,
        max_steps: Tensor,
        requested: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return requested.clamp(min=_LEAST_TEMPERATURE), (requested > 0).to(requested.dtype)

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
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
