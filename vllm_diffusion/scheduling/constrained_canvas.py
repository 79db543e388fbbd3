"""Constraints on the tokens of a canvas: a grammar, bad words, the length of a thought.

A grammar is a machine that reads tokens from left to right; a canvas is written everywhere at once.
The two meet at the frontier, the first position that is not settled yet: the tokens before it are
pinned, only tokens that the grammar allows there may be drawn at it, and the rest is free. When the
model repeats its canvas (or reaches the step cap) without satisfying the constraint, its valid
prefix is pinned, the frontier moves after it, and what follows is denoised anew. The frontier moves
by at least one position each time, so a canvas always comes to an end; past the step cap it moves
in every step. A canvas is committed only in a step that repeats what was found valid. Where no
token at all may follow what is settled, or only others than the one that the request itself holds
there (``diffusion_pinned``), :class:`DeadEndError` is raised, and the request ends.

The scheduler, which owns the grammars, decides all this from the canvas of the previous step;
:class:`AllowedTokens` is its message to the sampler.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.request import Request

from vllm_diffusion.canvas.messages import AllowedTokens
from vllm_diffusion.requests.arguments import constraining_fields, end_token_ids
from vllm_diffusion.scheduling.grammars import set_bits


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


def constraint_names(request: Request) -> str:
    """Return the names of the request's fields that constrain its canvases."""
    params = request.sampling_params
    return " with ".join(constraining_fields(params)) if params is not None else ""


class DeadEndError(Exception):
    """A request's constraint allows no token where its canvas stands; the text is the reason."""


class ConstrainedCanvas:
    """Progress of one request's current canvas towards its constraint.

    :meth:`denoised` records every step, :meth:`allowed_tokens` is called before the next.
    """

    def __init__(
        self, request: Request, manager: Any, max_steps: int, held: Mapping[int, int]
    ) -> None:
        """Begin with a canvas that no step has seen.

        Args:
            request: The engine's request.
            manager: The scheduler's ``EngineGrammars``, which own the compiled grammar.
            max_steps: The request's step cap; from there on the frontier moves in every step.
            held: Positions of the first canvas whose token the request brings and no step changes,
                counted from the first that is not a known token, to the position that the request
                named.
        """
        assert request.sampling_params is not None
        self._request = request
        self._manager = manager
        self._max_steps = max_steps
        self._held = held
        self._params = request.sampling_params
        self._end_tokens = frozenset(end_token_ids(self._params))
        self._bad_words = self._params.bad_words_token_ids or []
        self._longest_word = max(map(len, self._bad_words), default=1)
        self._thinking = ThinkingBudget.of(self._params, manager.vllm_config)
        if self._thinking is not None:
            self._thinking = self._thinking.after_prompt(request.prompt_token_ids or [])
        self._num_read = 0
        self.begin()

    def begin(self) -> None:
        """Start a new canvas."""
        self.has_given_way = False
        self.begin_again()

    def begin_again(self) -> None:
        """Restart the same canvas, as after a preemption: its draws are the same again."""
        self._steps = 0
        self._pinned: list[int] = []
        self._tokens: list[int] | None = None
        self._previous: list[int] | None = None

    @property
    def num_settled(self) -> int:
        """Number of leading positions of the canvas that will not change any more."""
        return len(self._pinned)

    def is_overdue(self) -> bool:
        """Return true if the canvas takes more steps than one without a constraint may."""
        return self._steps > self._max_steps

    def denoised(self, tokens: Sequence[int]) -> None:
        """Record a step's argmax canvas."""
        self._steps += 1
        self._previous, self._tokens = self._tokens, list(tokens)

    def allowed_tokens(self, width: int) -> AllowedTokens:
        """Return what the next step may draw.

        Args:
            width: Positions of the canvas.

        Raises:
            DeadEndError: If no token may stand at the frontier, or not the one that the request
                holds there.
        """
        num_needed = width
        if self._params.max_tokens is not None:
            num_needed = min(width, self._params.max_tokens - self._request.num_output_tokens)
        tokens = (self._tokens or [])[:num_needed]
        num_valid, is_complete = self._valid_prefix(tokens, num_needed)
        settled = self._previous is not None and self._previous[:num_needed] == tokens
        at_cap = self._steps >= self._max_steps
        restart = False
        if is_complete and at_cap:
            # The next step repeats it, whatever the model predicts.
            self._pinned = tokens[:num_valid]
        elif not is_complete and self._tokens is not None and (settled or at_cap):
            self._pinned = tokens[:num_valid]
            if num_valid in self._held and self._request.num_output_tokens == 0:
                named = self._held[num_valid]
                raise DeadEndError(f"does not allow the token of diffusion_pinned {named} there")
            restart = not at_cap
            # The positions after it are denoised anew, and have to repeat themselves again.
            self._tokens = self._previous = None
        mask = None
        if len(self._pinned) < (num_valid if is_complete else num_needed):
            mask = self._allowed_after(self._pinned)
            if mask is not None and not mask.any():
                raise DeadEndError("allows no token here")
        return AllowedTokens(tuple(self._pinned), mask, restart, num_valid if is_complete else 0)

    def _valid_prefix(self, tokens: list[int], num_needed: int) -> tuple[int, bool]:
        """Return how many leading tokens satisfy the constraint, and true if no more are needed."""
        num_thought, num_valid = self._num_accepted(tokens)
        longest = self._longest_word
        answer = self._last_output_tokens(longest - 1) + tokens
        thinking = self._thinking_after([])
        for i in range(num_valid):
            if thinking is not None:
                if thinking.token_due() not in (None, tokens[i]):
                    return i, False
                thinking.read(tokens[i])
            end = len(answer) - len(tokens) + i + 1
            read = answer[max(end - longest, 0) : end]
            ends_bad_word = any(read[-len(word) :] == word for word in self._bad_words)
            if ends_bad_word and not self._leaves_only(tokens[i], tokens[:i]):
                return i, False
            num_output_tokens = self._request.num_output_tokens + i + 1
            if tokens[i] in self._end_tokens and num_output_tokens > self._params.min_tokens:
                # An answer that ends before it has begun satisfies nothing.
                return (i, False) if i < num_thought else (i + 1, True)
        return num_valid, num_needed == num_valid

    def _thinking_after(self, pinned: list[int]) -> ThinkingBudget | None:
        """Return the request's thinking budget after the answer so far and ``pinned``."""
        if self._thinking is None:
            return None
        output = self._request.output_token_ids
        self._thinking = self._thinking.after(output[self._num_read :])
        self._num_read = len(output)
        return self._thinking.after(pinned)

    def _leaves_only(self, token: int, before: list[int]) -> bool:
        """Return true if the grammar allows nothing but bad words, ``token`` among them."""
        if not self._request.use_structured_output:
            return False
        mask = self._allowed_after(before)
        return mask is not None and bool(mask[token >> 5] >> (token & 31) & 1)

    def _last_output_tokens(self, count: int) -> list[int]:
        output = self._request.output_token_ids
        return list(output[max(len(output) - count, 0) :])

    def _num_accepted(self, tokens: list[int]) -> tuple[int, int]:
        """Return how many leading tokens are thoughts, in which all but end tokens are allowed, and
        how many these are with those that the grammar accepts after them.
        """
        if not self._request.use_structured_output:
            return 0, len(tokens)
        bounds = self._manager._get_constraint_bounds(self._request, tokens)
        num_thought = min(bounds.grammar_start, len(tokens))
        grammar = self._request.structured_output_request.grammar
        return num_thought, num_thought + len(grammar.validate_tokens(tokens[num_thought:]))

    def _allowed_after(self, pinned: list[int]) -> np.ndarray | None:
        """Return the bits of the tokens allowed after ``pinned``; ``None`` if all are."""
        thinking = self._thinking_after(pinned)
        if thinking is not None and (due := thinking.token_due()) is not None:
            # Other constraints begin when the thought has ended.
            return self._bits(due)
        mask = self._allowed_by_grammar(pinned)
        read = self._last_output_tokens(self._longest_word - 1) + pinned
        banned = [
            word[-1]
            for word in self._bad_words
            if len(word) == 1 or read[-(len(word) - 1) :] == word[:-1]
        ]
        if not banned:
            return mask
        without = self._without(banned, self._readable if mask is None else mask)
        if mask is not None and not without.any():
            # A bad word that the grammar requires is allowed.
            return mask
        return without

    @functools.cached_property
    def _readable(self) -> np.ndarray:
        """Bits of the tokens that are allowed where no grammar decides."""
        return self._bits(self._params.allowed_token_ids or slice(self._vocab_size))

    @property
    def _vocab_size(self) -> int:
        return self._manager.vllm_config.model_config.get_vocab_size()

    def _bits(self, tokens: list[int] | slice | int) -> np.ndarray:
        """Return a mask of these tokens alone."""
        chosen = np.zeros(-(-self._vocab_size // 32) * 32, dtype=bool)
        chosen[tokens] = True
        return np.packbits(chosen, bitorder="little").view(np.int32)

    @staticmethod
    def _without(banned: Iterable[int], mask: np.ndarray) -> np.ndarray:
        """Return ``mask`` without some tokens."""
        without = mask.copy()
        set_bits(without.view(np.uint32), banned, False)
        return without

    def _allowed_by_grammar(self, pinned: list[int]) -> np.ndarray | None:
        request = self._request
        if not request.use_structured_output:
            return None
        grammar = request.structured_output_request.grammar
        bounds = self._manager._get_constraint_bounds(request, pinned)
        if bounds.constraint_start > len(pinned):
            ends = {*self._end_tokens, *self._manager._masked_reasoning_ends(request)}
            return self._without(ends, self._readable)
        grammar_tokens = pinned[bounds.grammar_start :]
        if grammar_tokens:
            grammar.accept_tokens(request.request_id, grammar_tokens)
        try:
            if grammar.is_terminated():
                return None
            bitmask = self._manager.back_end_of(request).allocate_token_bitmask(1)
            grammar.fill_bitmask(bitmask, 0)
        finally:
            if grammar_tokens:
                grammar.rollback(len(grammar_tokens))
        return bitmask[0].numpy().copy()
