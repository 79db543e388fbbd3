"""DiffusionGemma's rule: accept by an entropy budget, stop when stable and confident."""

import torch
from torch import Tensor

from vllm_diffusion.decoding.rule import (
    FLOAT32_MAX,
    FLOAT32_MIN,
    INT32_MAX,
    DecodingRule,
    Memory,
    Setting,
    StepDecision,
    StepInputs,
    Tensors,
    Values,
    in_budget,
    is_first,
    keep_first_token,
)

# Bounds of temperatures: divided logits stay distinct and finite.
_LEAST, _MOST = 1e-4, 1e4


class EntropyBound(DecodingRule):
    """Accept positions from most to least certain while the entropy before each is in budget.

    A canvas is done when its argmax repeated for ``stability_threshold`` steps and the mean entropy
    is below ``confidence_threshold``. The argmax canvas is emitted, not the noisy one. Fixed
    positions are kept, and their entropies count nowhere: the model need not agree with them. The
    temperature falls from ``t_max`` towards ``t_min``; a request's own temperature multiplies it in
    draws.

    Source: arXiv:2505.24857 (the bound) and ``EntropyBoundSampler`` and
    ``StableAndConfidentStoppingCriteria`` of transformers' diffusion_gemma.
    """

    settings = {
        "entropy_bound": Setting(
            float,
            FLOAT32_MIN,
            FLOAT32_MAX,
            "nats: the budget of each step; more keeps more candidates at once",
        ),
        "confidence_threshold": Setting(
            float,
            FLOAT32_MIN,
            FLOAT32_MAX,
            "nats: a stable canvas is done when its mean entropy is below this",
        ),
        "stability_threshold": Setting(
            int, 0, INT32_MAX, "earlier steps whose argmax canvas must be the same"
        ),
        # No step gets there, so that it may be 0: the last has at least t_max / N.
        "t_min": Setting(float, 0.0, _MOST, "what the temperature falls to, over the N steps"),
        "t_max": Setting(float, _LEAST, _MOST, "the temperature at the first step"),
    }
    # Trade-offs between passes and quality; "balanced" has DiffusionGemma's published values.
    # docs/use/requests.md has their figures on the shipped checkpoint, with the command.
    presets = {
        "fast": {"entropy_bound": 0.1, "confidence_threshold": 0.01, "stability_threshold": 0},
        "balanced": {"entropy_bound": 0.1, "confidence_threshold": 0.005, "stability_threshold": 1},
        "quality": {
            "entropy_bound": 0.05,
            "confidence_threshold": 0.0025,
            "stability_threshold": 2,
        },
    }
    # Number of consecutive steps that repeated the argmax of the previous step.
    memory = {"stable_steps": Memory(torch.int32)}

    def contradiction(self, values: Values) -> tuple[tuple[str, ...], str] | None:
        t_min, t_max = values["t_min"], values["t_max"]
        if float(t_max) >= float(t_min):
            return None
        reason = f"t_max={t_max} is below t_min={t_min}; the temperature falls from t_max to t_min"
        return ("t_max", "t_min"), reason

    def temperatures(
        self,
        settings: Tensors,
        step: Tensor,
        max_steps: Tensor,
        requested: Tensor,
    ) -> tuple[Tensor, Tensor]:
        remaining = (max_steps - step).clamp(min=1).float()
        fraction = remaining / max_steps.clamp(min=1).float()
        t_min, t_max = settings["t_min"], settings["t_max"]
        return t_min + (t_max - t_min) * fraction, requested

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        # Fixed positions, and those beyond a narrow canvas, sort last and take nothing from the
        # budget.
        predicted = inputs.predicted
        entropy = torch.where(inputs.valid & ~inputs.fixed, predicted.entropy, torch.inf)
        ascending, order = torch.sort(entropy, dim=-1, stable=True)
        accepted = in_budget(ascending, settings["entropy_bound"])
        keep = torch.zeros_like(accepted).scatter(-1, order, accepted)
        keep = (keep | inputs.fixed) & inputs.valid

        counted = inputs.counted(predicted.argmax)
        repeated = ((predicted.argmax == inputs.previous_result) | ~counted).all(dim=-1)
        stable_steps = torch.where(repeated, memory["stable_steps"] + 1, 0)
        judged = counted & ~inputs.fixed
        num_judged = judged.sum(dim=-1).clamp(min=1)
        mean_entropy = torch.where(judged, predicted.entropy, 0.0).sum(dim=-1) / num_judged
        done = (stable_steps >= settings["stability_threshold"]) & (
            mean_entropy < settings["confidence_threshold"]
        )
        return StepDecision(
            keep=keep,
            tokens=predicted.candidate,
            result=predicted.argmax,
            done=done,
            memory={"stable_steps": stable_steps},
        )


class DenoisedDraft(EntropyBound):
    """Draft a canvas of noise after its first token, which is certain; the pass that commits it
    verifies it.

    After the last of ``draft_steps`` steps a draft is the likeliest token of every position;
    between steps positions are kept as :class:`EntropyBound` keeps them. Then it is as in
    :class:`LinearSpec`: a causal pass draws the token after each row, and the draft decides only
    how many come at once.

    Source: arXiv:2608.00146, which has drafts of diffusion verified by the same weights. It gives
    no loop: that the draft is greedy, begins in noise and takes a fixed number of steps is ours.
    """

    settings = {
        name: setting for name, setting in EntropyBound.settings.items() if name[:2] != "t_"
    }
    presets = {}
    refused_settings = {
        "max_denoising_steps": "whose drafts take draft_steps",
        "draft_adapter": "whose model drafts without one",
    }
    # A verified token is drawn as in an autoregressive model.
    temperatures = DecodingRule.temperatures

    def contradiction(self, values: Values) -> tuple[tuple[str, ...], str] | None:
        return None

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        decision = super().decide(keep_first_token(inputs), settings, memory)
        return decision._replace(keep=decision.keep | is_first(inputs.canvas))
