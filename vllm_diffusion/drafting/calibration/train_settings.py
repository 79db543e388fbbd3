"""Settings of a draft's training; this module does not import torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a draft's training.

    Attributes:
        steps: Steps of the optimizer.
        batch_size: Samples per step.
        anchors: Blocks per sample.
        learning_rate: Highest learning rate, after warming up; it falls to a twentieth along a
            cosine.
        warm_up: Share of the steps in which the learning rate rises.
        revealed_share: Share of the blocks of which a random share is revealed.
        gamma: Decay of the loss weights: position k of a block weighs ``exp(-(k - 1) / gamma)``.
            The default is half a block, the paper's value for blocks of 8 and 10 (for 16 it has 7).
        report_every: Steps between two reports.
        seed: Seed of anchors and masks.
        minutes: Time in minutes after which training ends even if steps are left; the learning
            rate falls with whichever ends first. ``None`` for no limit.
    """

    steps: int
    batch_size: int = 16
    anchors: int = 16
    learning_rate: float = 2e-3
    warm_up: float = 0.04
    revealed_share: float = 0.25
    gamma: float | None = None
    report_every: int = 50
    seed: int = 0
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "anchors", "report_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("warm_up", "revealed_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be a share, from 0 to 1.")
        for name in ("learning_rate", "gamma", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a number above 0.")
