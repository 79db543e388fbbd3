"""Kinds of settings that steer denoising, with their allowed values.

A server sets them under these names, a request with the prefix ``diffusion_``. Numbers are bounded
by the dtype of the tensor that holds them on the device, int32 or float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

INT32_MAX = 2**31 - 1
# Smaller numbers lose their digits in float32, or are 0.
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, 3.4028234663852886e38


@dataclass(frozen=True)
class Setting:
    """Setting whose value is a number.

    Attributes:
        kind: ``int`` or ``float``.
        low: Smallest allowed value.
        high: Largest allowed value.
        meaning: Effect of the setting, in a few words of Markdown.
    """

    kind: type[int] | type[float]
    low: float
    high: float
    meaning: str = ""

    def allows(self, value: object) -> bool:
        """Return true if ``value`` is an allowed number."""
        kinds = (int,) if self.kind is int else (int, float)
        # JSON's true and false are integers in Python; NaN fails the comparison.
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        number: float = value
        return self.low <= number <= self.high

    @property
    def rule(self) -> str:
        """End of the message about a number that is not allowed, behind its name."""
        noun = "an integer" if self.kind is int else "a number"
        return f"must be {noun} of at least {self.low:.10g} and at most {self.high:.10g}"

    @property
    def values(self) -> str:
        """Allowed values in a few words, for the documentation."""
        noun = "integer" if self.kind is int else "number"
        return f"{noun}, {self.low:.7g} to {self.high:.7g}"

    @property
    def bounds(self) -> dict[str, Any]:
        """Allowed values as JSON: ``is_integer``, ``low`` and ``high``."""
        return {"is_integer": self.kind is int, "low": self.low, "high": self.high}

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensor that holds it."""
        return torch.int32 if self.kind is int else torch.float32

    def number(self, value: float | str) -> float:
        """Convert a value to the number in the tensor."""
        return self.kind(value)


@dataclass(frozen=True)
class Choice:
    """Setting whose value is one of a few words.

    Attributes:
        words: Allowed words; the tensor holds the index of one.
        meaning: Effect of the setting, in a few words of Markdown.
    """

    words: tuple[str, ...]
    meaning: str = ""
    dtype = torch.int32

    def allows(self, value: object) -> bool:
        """Return true if ``value`` is one of the words."""
        return isinstance(value, str) and value in self.words

    @property
    def values(self) -> str:
        """Allowed values in a few words, for the documentation."""
        return ", ".join(f'`"{word}"`' for word in self.words)

    @property
    def bounds(self) -> dict[str, Any]:
        """Allowed values as JSON: ``words``."""
        return {"words": self.words}

    @property
    def rule(self) -> str:
        """End of the message about a word that is not allowed, behind its name."""
        return f"must be one of {', '.join(self.words)}"

    def number(self, value: float | str) -> float:
        """Convert a word to its index in the tensor."""
        return self.words.index(str(value))


# Each step is a pass: a larger cap would only be a mistake.
MAX_STEPS = Setting(int, 1, 10_000)
# A request's step cap is lowered to the server's.
REQUESTED_STEPS = Setting(int, 1, INT32_MAX)
