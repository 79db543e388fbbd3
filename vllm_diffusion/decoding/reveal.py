"""Rules of masked models: reveal confident tokens and keep them, rewrite them, or have them
verified.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_diffusion.decoding.rule import (
    Choice,
    DecodingRule,
    Memory,
    Setting,
    StepDecision,
    StepInputs,
    Tensors,
    Values,
    in_budget,
    keep_first_token,
    places,
)

DYNAMIC, STATIC, SEQUENTIAL, ENTROPY, ENTROPY_BUDGET = STRATEGIES = (
    "dynamic",
    "static",
    "sequential",
    "entropy",
    "entropy_budget",
)
# Threshold of a remedy, where a checkpoint's own reveals nothing: the one of most families.
_USUAL_THRESHOLD = 0.9
# Options of loops that follow LLaDA's: what equals the threshold passes, a probability is the
# model's own, and the masks of a canvas are spread over its steps.
AS_LLADA: dict[str, Any] = {
    "includes_threshold": True,
    "at_request_temperature": False,
    "spreads_masks": True,
}


def even_share(steps_left: Tensor, max_steps: Tensor) -> Tensor:
    """Return 1 - s / t of a step that begins at time t = n / N and ends at s = (n - 1) / N, [R],
    float64.

    It is 1 / n, as BD3LM's float32 has it: there a product with it that would be a half may be
    rounded either way. Quotients are taken in float64 and then rounded, which is the correctly
    rounded float32 quotient on every device; a compiled division of float32 need not be.

    Args:
        steps_left: [R], integer, n, from this step to the last one, at least 1.
        max_steps: [R], integer, N.

    Source: ``reverse_mask_prob`` and ``LinearAlphaScheduler`` of ZHZisZZ/dllm at ca17675,
    ``alpha.py``, where the share of masks at a time is 1 - (1 - time).
    """

    def masked_at(num_left: Tensor) -> Tensor:
        return 1 - (1 - (num_left.double() / max_steps).float())

    end, start = masked_at(steps_left - 1), masked_at(steps_left)
    return 1 - (end.double() / start.double()).float().double()


@dataclass(eq=False)
class Reveal(DecodingRule):
    """Reveal masks by their certainty or from the left; a revealed token stays.

    A canvas of C positions has N steps, N the step cap: step s is to reveal at least n[s] masks,
    which is C spread evenly over the steps, the larger numbers first; or, with ``spreads_masks``,
    the masks that the canvas began with. A mask's probability is that of the token drawn there.

    - ``dynamic``: every mask whose probability is above ``reveal_threshold`` if these are n[s],
      else the n[s] most probable.
    - ``static``: the n[s] most probable.
    - ``sequential``: the n[s] leftmost.
    - ``entropy``: the n[s] of least entropy.
    - ``entropy_budget``: masks by ascending entropy, as many as sum up to at most
      ``entropy_budget`` without the last, and no fewer than n[s].

    The canvas is done when nothing is masked; at the step cap the remaining masks take their drawn
    tokens. Among equals the leftmost comes first.

    Source: ``block_diffusion_generate`` of JetAstra/SDAR, ``generate.py`` at c2041a8; threshold and
    at least one a step: Fast-dLLM, arXiv:2505.22618, section 3.3; the budget is the gamma of
    arXiv:2505.24857. Deviations of a family are stated in its start-up checks.

    Attributes:
        mask_token_id: Token of positions that are not revealed.
        includes_threshold: True if a probability that equals the threshold suffices.
        at_request_temperature: True if the probability is that under the request's temperature and
            filters; false for the model's own at temperature 1.
        judges_to_end: True if an end token with no mask before it ends the canvas.
        spreads_masks: True if a canvas's masks, without given positions, are spread over the steps;
            false if its length is.
        rounds_to_even: True if a step's part of masks that are spread is rounded, halves to even,
            after a product with a share in float32: see :func:`even_share`; false if it is rounded
            up, so that larger numbers come first.
        sub_block_length: Positions of a sub-block; masks are revealed only in the first sub-block
            that has any. ``None`` to reveal in the whole canvas.
    """

    settings = {
        "reveal_threshold": Setting(
            float, 0.0, 1.0, "`dynamic` reveals every mask whose probability is above it"
        ),
        "strategy": Choice(
            STRATEGIES,
            "what a step reveals: what is above the threshold; the most probable, the leftmost or those "
            "of least entropy of an even schedule over the N steps; or what an entropy budget holds",
        ),
        "entropy_budget": Setting(
            float,
            0.0,
            10_000,
            "nats: `entropy_budget` reveals masks by ascending entropy, as many as have at most this "
            "without the last",
        ),
    }
    defaults = {"entropy_budget": 0.1}

    mask_token_id: int
    _: KW_ONLY
    includes_threshold: bool = False
    at_request_temperature: bool = True
    judges_to_end: bool = False
    spreads_masks: bool = False
    rounds_to_even: bool = False
    sub_block_length: int | None = None

    def faster(self, values: Values, max_steps: int, length: int) -> Values:
        if length == 1 or max_steps < length:
            return {}
        strategy = values["strategy"]
        if strategy == ENTROPY_BUDGET:
            return {} if float(values["entropy_budget"]) > 0 else Reveal.defaults
        has_threshold = float(values["reveal_threshold"]) < 1
        threshold = {} if has_threshold else {"reveal_threshold": _USUAL_THRESHOLD}
        return threshold if strategy == DYNAMIC else {"strategy": DYNAMIC, **threshold}

    def temperatures(
        self,
        settings: Tensors,
        step: Tensor,
        max_steps: Tensor,
        requested: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if not self.at_request_temperature:
            return torch.ones_like(requested), requested
        return super().temperatures(settings, step, max_steps, requested)

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        masked = self.masked(inputs)
        reveal = self.revealed(inputs, settings, masked, self.num_least(inputs, masked))
        tokens = torch.where(masked, inputs.predicted.candidate, inputs.canvas)
        decided = reveal | ~masked
        counted = inputs.counted(tokens, decided)
        return StepDecision(
            keep=decided,
            tokens=tokens,
            result=tokens,
            done=~(~decided & counted).any(dim=-1),
            memory={},
        )

    def read(self, canvas: Tensor, num_known: Tensor, settings: Tensors) -> Tensor | None:
        return None if self.revises else canvas == self.mask_token_id

    def masked(self, inputs: StepInputs) -> Tensor:
        """Return the positions that are not decided before the step, [R, C], bool."""
        return (inputs.canvas == self.mask_token_id) & inputs.valid & ~inputs.fixed

    def revealed(
        self,
        inputs: StepInputs,
        settings: Tensors,
        masked: Tensor,
        num_least: Tensor,
    ) -> Tensor:
        """Return the masks that the step reveals, [R, C], bool.

        Args:
            inputs: Inputs of the step.
            settings: Settings of the rule, [R] each.
            masked: [R, C], bool, the masks.
            num_least: [R], the least number of masks to reveal, if there are as many.
        """
        candidates = masked
        if self.sub_block_length is not None:
            length = masked.shape[-1]
            sub_block = torch.arange(length, device=masked.device) // self.sub_block_length
            first = torch.where(masked, sub_block, length).amin(dim=-1, keepdim=True)
            candidates = masked & (sub_block == first)
        strategy = {name: settings["strategy"][:, None] == i for i, name in enumerate(STRATEGIES)}
        position = torch.arange(masked.shape[-1], device=masked.device)
        score = torch.where(strategy[SEQUENTIAL], -position, inputs.predicted.drawn_confidence)
        by_entropy = strategy[ENTROPY] | strategy[ENTROPY_BUDGET]
        score = torch.where(by_entropy, -inputs.predicted.entropy, score)
        score = torch.where(candidates, score, -torch.inf)
        descending, order = torch.sort(score, dim=-1, descending=True, stable=True)
        place = places(order)
        num_least = num_least[:, None]
        affordable = in_budget(-descending, settings["entropy_budget"]) & strategy[ENTROPY_BUDGET]
        in_order = candidates & (place < affordable.sum(dim=-1, keepdim=True).maximum(num_least))
        confidence, threshold = (
            inputs.predicted.drawn_confidence,
            settings["reveal_threshold"][:, None],
        )
        passes = confidence >= threshold if self.includes_threshold else confidence > threshold
        confident = candidates & passes
        is_enough = confident.sum(dim=-1, keepdim=True) >= num_least
        return torch.where(strategy[DYNAMIC] & is_enough, confident, in_order)

    def num_least(self, inputs: StepInputs, masked: Tensor) -> Tensor:
        """Return the least number of masks that the step reveals, [R], at least 1.

        Args:
            inputs: Inputs of the step.
            masked: [R, C], bool, the masks.
        """
        max_steps = inputs.max_steps.clamp(min=1)
        if self.spreads_masks:
            # The rest of an even schedule, larger numbers first, begins with its mean rounded up.
            steps_left = (max_steps - inputs.step).clamp(min=1)
            if self.rounds_to_even:
                # A part below a half gives no step: it is left out, and the next one has a mask.
                part = masked.sum(dim=-1) * even_share(steps_left, max_steps)
                return part.round().long().clamp(min=1)
            least = (masked.sum(dim=-1) + steps_left - 1) // steps_left
        else:
            length = inputs.canvas.shape[-1]
            base, more = length // max_steps, length % max_steps
            least = base + (inputs.step < more).to(base.dtype)
        return least.clamp(min=1)


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
    revises = True
    # The two modes of the README.
    presets = {
        "quality": {"reveal_threshold": 0.7, "editing_threshold": 0.5},
        "speed": {"reveal_threshold": 0.5, "editing_threshold": 0.0},
    }
    # Number of steps that found no mask.
    memory = {"post_steps": Memory(torch.int32)}
    can_finish_kv = True

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        masked = self.masked(inputs)
        reveal = self.revealed(inputs, settings, masked, self.num_least(inputs, masked))
        edit = (
            inputs.valid & ~inputs.fixed & ~masked & (inputs.predicted.candidate != inputs.canvas)
        )
        edit = edit & (inputs.predicted.drawn_confidence > settings["editing_threshold"][:, None])
        tokens = torch.where(masked | edit, inputs.predicted.candidate, inputs.canvas)
        decided = reveal | ~masked
        counted = inputs.counted(tokens, decided)
        has_no_mask = ~(masked & counted).any(dim=-1)
        repeats = has_no_mask & ~(edit & counted).any(dim=-1)
        post_steps = memory["post_steps"] + has_no_mask.to(torch.int32)
        leaves_none = ~(~decided & counted).any(dim=-1)
        is_last = leaves_none & (post_steps >= settings["max_post_steps"])
        return StepDecision(
            keep=decided,
            tokens=tokens,
            result=tokens,
            done=repeats | is_last,
            memory={"post_steps": post_steps},
            # After an end token anything may have changed.
            has_final_kv=repeats & ~((reveal | edit) & inputs.valid).any(dim=-1),
        )


class LinearSpec(DecodingRule):
    """Draft a canvas after its first token, which is certain; the pass that commits it verifies it.

    A draft is the likeliest token of every position, in one step. Then a causal pass over the
    canvas draws, in each row, the token after it, as without any draft. Drafted tokens are kept up
    to the first that differs from the drawn one, and the token drawn there begins the next canvas.
    So the tokens are those of drawing one after another: the draft decides only how many come at
    once.

    Source: ``linear_spec_generate`` of nvidia/Nemotron-Labs-Diffusion with ``threshold=0``. It
    differs: a draft is greedy at any temperature, and a first token that is the mask token stays,
    where that code drafts over it and so leaves the law of drawing one after another.
    """

    settings = {}
    refused_settings = dict.fromkeys(
        ("max_denoising_steps", "draft_steps"), "whose drafts take one step"
    )

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        tokens = keep_first_token(inputs).predicted.candidate
        return StepDecision(
            keep=inputs.valid,
            tokens=tokens,
            result=tokens,
            done=torch.ones_like(inputs.step, dtype=torch.bool),
            memory={},
        )
