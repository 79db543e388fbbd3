"""Grammars of an engine's requests: vLLM's manager with a back end for each request, and llguidance
for it.

llguidance compiles lazily: a schema takes milliseconds at a vocabulary of 262,144 where xgrammar
may take seconds, and the length of a string costs it nothing. xgrammar compiles structural tags and
EBNF.
"""

import copy
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
from vllm.v1.structured_output.utils import strip_speculative_padding

from vllm_diffusion.requests.arguments import end_token_ids
from vllm_diffusion.requests.guidance import GUIDANCE, guidance_grammar
from vllm_diffusion.requests.threads import LeavableThreads

# Until a request whose grammar is not compiled ends with an error. The API process has refused
# what takes llguidance 5 s; xgrammar's work grows with the vocabulary too.
MOST_SECONDS = 60.0


class EngineGrammars(StructuredOutputManager):
    """vLLM's manager of grammars, in which each request has the back end that its check chose.

    Stock has one back end, that of the first request, and refuses every request that needs another.
    """

    # One manager for each back end, made by `of`; they share the tokenizer and the threads.
    _managers: dict[str, StructuredOutputManager]
    backend: Any

    @classmethod
    def of(cls, manager: StructuredOutputManager) -> None:
        """Make ``manager``, which the engine holds and has not used yet, one of this class."""
        manager.__class__ = cls
        manager._managers = {}
        if hasattr(manager, "executor"):
            manager.executor.shutdown()
            # As many as vLLM has.
            count = max(1, ((os.cpu_count() or 1) + 1) // 2)
            manager.executor = LeavableThreads(count, "grammar", MOST_SECONDS)

    def grammar_init(self, request: Request) -> None:
        name = _back_end_name(request)
        if name is None:
            return
        manager = self._managers.get(name)
        if manager is None:
            manager = self._managers[name] = copy.copy(self)
            manager.backend = None
            if name == GUIDANCE:
                vocab_size = self.vllm_config.model_config.get_vocab_size()
                manager.backend = Guidance(self.vllm_config, self.tokenizer, vocab_size)
                manager.backend_name = name
        StructuredOutputManager.grammar_init(manager, request)
        # vLLM allocates masks from this one; those of all back ends are as wide.
        self.backend = self.backend or manager.backend

    def back_end_of(self, request: Request) -> Any:
        """Return the back end of a request that has a grammar."""
        return self._managers[str(_back_end_name(request))].backend

    def clear_backend(self) -> None:
        """Release all back ends: each manager waits for the threads, which end once."""
        for manager in self._managers.values():
            StructuredOutputManager.clear_backend(manager)
        self.backend = None
        super().clear_backend()


class OrdinaryGrammars(EngineGrammars):
    """Grammars of the autoregressive mode, in which vLLM's own sampler draws token after token."""

    def _masked_reasoning_ends(self, request: Request) -> tuple[int, ...]:
        """Return the tokens that a thought may not have, those that end an answer among them.

        A grammar that accepts an end as its first token is satisfied by it.
        """
        masked = super()._masked_reasoning_ends(request)
        assert request.structured_output_request is not None
        grammar: Any = request.structured_output_request.grammar
        ends = end_token_ids(request.sampling_params)
        return (*masked, *(end for end in ends if not grammar.validate_tokens([end])))


def _back_end_name(request: Request) -> str | None:
    params = request.sampling_params
    constraint = None if params is None else params.structured_outputs
    return None if constraint is None else constraint._backend


@dataclass
class Guidance(GuidanceBackend):
    """llguidance for any tokenizer and all end tokens of a request."""

    def __post_init__(self) -> None:
        self.ll_tokenizer = _ll_tokenizer(self.tokenizer, self.vocab_size)

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: Collection[int] | None = None,
    ) -> StructuredOutputGrammar:
        from llguidance import LLMatcher

        grammar = guidance_grammar(request_type.name.lower(), grammar_spec)
        matcher = LLMatcher(self.ll_tokenizer, grammar, log_level=0)
        if error := matcher.get_error():
            raise ValueError(error)
        # A request without any end token ends with the tokenizer's.
        ends = frozenset(stop_token_ids or self.ll_tokenizer.eos_tokens)
        return GuidedText(matcher, ends, ends.union(self.ll_tokenizer.eos_tokens))


class GuidedText(StructuredOutputGrammar):
    """A request's text up to now, as llguidance reads it, and whether the text has ended.

    Any end token of the request ends it where the grammar is satisfied; llguidance knows one of
    them.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], marks: frozenset[int]) -> None:
        """Begin with an empty text.

        Args:
            matcher: llguidance's ``LLMatcher``.
            ends: Token ids that end the request; before the grammar is satisfied it may have none
                of them.
            marks: These, and the token ids that end a text for llguidance.
        """
        self._matcher = matcher
        self._ends = ends
        self._marks = marks
        # Tokens that were read since the text ended, its end among them.
        self._num_after = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Read tokens; false if the grammar does not allow them."""
        for i, token in enumerate(tokens):
            if self._num_after or (token in self._ends and self._matcher.is_accepting()):
                self._num_after += len(tokens) - i
                return True
            if token in self._marks or not self._matcher.consume_token(token):
                return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the leading tokens that the grammar allows, up to the first that ends the text."""
        tokens = strip_speculative_padding(tokens)
        if self._num_after:
            return []
        i = next((i for i, token in enumerate(tokens) if token in self._marks), len(tokens))
        before = tokens[:i]
        num_valid = self._matcher.validate_tokens(before) if before else 0
        if num_valid < i or i == len(tokens) or tokens[i] not in self._ends:
            return tokens[:num_valid]
        if before:
            self._matcher.consume_tokens(before)
        is_satisfied = self._matcher.is_accepting()
        if before:
            self._matcher.rollback(i)
        return tokens[: i + is_satisfied]

    def rollback(self, num_tokens: int) -> None:
        """Forget the latest tokens."""
        num_after = min(num_tokens, self._num_after)
        self._num_after -= num_after
        if num_tokens > num_after:
            self._matcher.rollback(num_tokens - num_after)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Write which tokens may come next: a bit for each, in a row of ``bitmask``, int32."""
        import llguidance.torch

        row = bitmask[batch_index].numpy().view(np.uint32)
        if self._num_after:
            row[:] = 0
        else:
            llguidance.torch.fill_next_token_bitmask(self._matcher, bitmask, batch_index)
            set_bits(row, self._marks, False)
        if self._num_after or self._matcher.is_accepting():
            set_bits(row, self._ends, True)

    def is_terminated(self) -> bool:
        """Return true if the text has ended."""
        return self._num_after > 0

    def reset(self) -> None:
        """Begin anew."""
        self._matcher.reset()
        self._num_after = 0


def set_bits(row: np.ndarray, tokens: Iterable[int], value: bool) -> None:
    """Write the bits of some tokens into a mask, uint32."""
    for token in tokens:
        bit = np.uint32(1 << (token & 31))
        row[token >> 5] = row[token >> 5] | bit if value else row[token >> 5] & ~bit


def _ll_tokenizer(tokenizer: Any, vocab_size: int) -> Any:
    """Make llguidance's tokenizer; of one that is written in Python, from the bytes of its
    tokens.
    """
    if GuidanceBackend.is_tokenizer_supported(tokenizer):
        return GuidanceBackend._build_ll_tokenizer(tokenizer, vocab_size)
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper
    from xgrammar import TokenizerInfo

    return LLTokenizer(
        TokenizerWrapper(
            _Bytes(tokenizer, TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size))
        )
    )


class _Bytes:
    """What llguidance asks of a tokenizer that it does not know."""

    def __init__(self, tokenizer: Any, info: Any) -> None:
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [token or f"<{i}>".encode() for i, token in enumerate(info.decoded_vocab)]
        special = {*info.special_token_ids, *tokenizer.all_special_ids}
        self.special_token_ids = sorted(token for token in special if token < len(self.tokens))
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        ids: list[int] = self._encode(text, add_special_tokens=False)
        return ids
