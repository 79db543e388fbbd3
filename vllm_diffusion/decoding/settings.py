"""The numbers that steer denoising, and what they may be.

A server sets them under these names, a request with ``diffusion_`` before them. The bounds are
those of the element of a tensor that holds the number on the device: what an integer of 32 bits or
float32 does not hold would be another number there, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_INT32_MAX = 2**31 - 1
# Smaller numbers lose their digits in float32, or are 0.
_FLOAT32_MIN, _FLOAT32_MAX = 2.0**-126, 3.4028234663852886e38


@dataclass(frozen=True)
class Setting:
    """A number.

    Attributes:
        kind: ``int`` or ``float``.
        low: The least.
        high: The largest.
    """

    kind: type[int] | type[float]
    low: float
    high: float

    def allows(self, value: object) -> bool:
        """Whether ``value`` is such a number."""
        kinds = (int,) if self.kind is int else (int, float)
        # JSON's true and false are integers to Python, and a NaN is within nothing.
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        number: float = value
        return self.low <= number <= self.high

    @property
    def rule(self) -> str:
        """What is said of a number that is not allowed, behind its name."""
        noun = "an integer" if self.kind is int else "a number"
        return f"must be {noun} of at least {self.low:.10g} and at most {self.high:.10g}"


# Each step is a pass: more of them end no canvas that is not a mistake.
MAX_STEPS = Setting(int, 1, 10_000)
# A request's is lowered to the server's.
REQUESTED_STEPS = Setting(int, 1, _INT32_MAX)
# Logits are divided by it: they stay apart, and finite.
_TEMPERATURE = Setting(float, 1e-4, 1e4)

# What a request and a server may set of a canvas, by name.
QUALITY: Mapping[str, Setting] = {
    "entropy_bound": Setting(float, _FLOAT32_MIN, _FLOAT32_MAX),
    "confidence_threshold": Setting(float, _FLOAT32_MIN, _FLOAT32_MAX),
    "stability_threshold": Setting(int, 0, _INT32_MAX),
    "t_min": _TEMPERATURE,
    "t_max": _TEMPERATURE,
}

# What a server may set.
SERVER: Mapping[str, Setting] = {"max_denoising_steps": MAX_STEPS, **QUALITY}

# Trade-offs between passes and quality; "balanced" is what DiffusionGemma is published with. What
# they cost and give on the shipped checkpoint is in docs/requests.md, with the command.
PRESETS: Mapping[str, Mapping[str, float]] = {
    "fast": {"entropy_bound": 0.1, "confidence_threshold": 0.01, "stability_threshold": 0},
    "balanced": {"entropy_bound": 0.1, "confidence_threshold": 0.005, "stability_threshold": 1},
    "quality": {"entropy_bound": 0.05, "confidence_threshold": 0.0025, "stability_threshold": 2},
}
