"""Limit for the length of thoughts: ``thinking_token_budget``, which Anthropic's API sends too."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass
class ThinkingBudget:
    """Reader of a request's tokens that gives the tokens which end a thought that is too long.

    Each thought has a whole budget, and thoughts do not nest. A thought that began in the prompt
    counts from its start.

    Attributes:
        most: Limit for the tokens between the start of a thought and its end.
        start: Token ids that begin a thought.
        end: Token ids with which the model ends a thought.
        forced: Token ids that are forced when the budget is used up; the last of them are ``end``.
    """

    most: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    forced: tuple[int, ...]

    def __post_init__(self) -> None:
        # Tokens of the thought that is open, if one is; the latest tokens, to find marks in.
        self._length: int | None = None
        self._latest: list[int] = []

    @classmethod
    def of(cls, params: Any, vllm_config: Any) -> ThinkingBudget | None:
        """Make a request's budget, with nothing read; ``None`` if it has none.

        Args:
            params: ``SamplingParams`` of the request.
            vllm_config: Configuration, whose reasoning parser has the marks of a thought.
        """
        if params.thinking_token_budget is None or params.thinking_token_budget < 0:
            return None
        marks = vllm_config.reasoning_config
        return cls(
            params.thinking_token_budget,
            tuple(marks.reasoning_start_token_ids),
            tuple(marks.natural_reasoning_end_token_ids),
            tuple(marks.reasoning_end_token_ids),
        )

    def after(self, tokens: Iterable[int]) -> ThinkingBudget:
        """Return a copy that has read ``tokens`` as well."""
        later = copy.copy(self)
        later._latest = list(self._latest)
        for token in tokens:
            later.read(token)
        return later

    def after_prompt(self, tokens: Iterable[int]) -> ThinkingBudget:
        """Return a copy that has read the prompt; a thought that is too long in it ends at once."""
        later = self.after(tokens)
        if later._length is not None:
            later._length = min(later._length, self.most)
        return later

    def read(self, token: int) -> None:
        """Read the next token."""
        self._latest.append(token)
        del self._latest[: -max(len(self.start), len(self.end))]
        if self._length is not None:
            self._length += 1
        if self._ends_with(self.end):
            self._length = None
        elif self._length is None and self._ends_with(self.start):
            self._length = 0

    def _ends_with(self, mark: tuple[int, ...]) -> bool:
        return tuple(self._latest[-len(mark) :]) == mark

    def token_due(self) -> int | None:
        """Return the only token that may come next; ``None`` if the budget does not fix it."""
        if self._length is None or not 0 <= self._length - self.most < len(self.forced):
            return None
        return self.forced[self._length - self.most]
