"""The settings that steer denoising, and what they may be.

A server sets them under these names, a request with ``diffusion_`` before them. The bounds of numbers
are those of the element of a tensor that holds the number on the device: what an integer of 32 bits
or float32 does not hold would be another number there, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INT32_MAX = 2**31 - 1
# Smaller numbers lose their digits in float32, or are 0.
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, 3.4028234663852886e38


@dataclass(frozen=True)
class Setting:
    """A number.

    Attributes:
        kind: ``int`` or ``float``.
        low: The least.
        high: The largest.
        meaning: What it does, in a few words of Markdown.
    """

    kind: type[int] | type[float]
    low: float
    high: float
    meaning: str = ""

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

    @property
    def values(self) -> str:
        """What it may be, in a few words."""
        noun = "integer" if self.kind is int else "number"
        return f"{noun}, {self.low:.7g} to {self.high:.7g}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that holds it."""
        return torch.int32 if self.kind is int else torch.float32

    def number(self, value: float | str) -> float:
        """What the tensor holds."""
        return self.kind(value)


@dataclass(frozen=True)
class Choice:
    """One of a few words.

    Attributes:
        words: All of them; a tensor holds the place of one.
        meaning: What it does, in a few words of Markdown.
    """

    words: tuple[str, ...]
    meaning: str = ""
    dtype = torch.int32

    def allows(self, value: object) -> bool:
        """Whether ``value`` is one of the words."""
        return isinstance(value, str) and value in self.words

    @property
    def values(self) -> str:
        """What it may be, in a few words."""
        return ", ".join(f'`"{word}"`' for word in self.words)

    @property
    def rule(self) -> str:
        """What is said of a word that is not allowed, behind its name."""
        return f"must be one of {', '.join(self.words)}"

    def number(self, value: float | str) -> float:
        """What the tensor holds."""
        return self.words.index(str(value))


# Each step is a pass: more of them end no canvas that is not a mistake.
MAX_STEPS = Setting(int, 1, 10_000)
# A request's is lowered to the server's.
REQUESTED_STEPS = Setting(int, 1, INT32_MAX)
