"""What llguidance lets be written under a constraint, byte by byte."""

from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer

from vllm_diffusion.requests.guidance import guidance_grammar


def byte_matcher(kind: str, constraint: str) -> LLMatcher:
    """Return a matcher of bytes for a constraint of a kind that ``guidance_grammar`` knows."""
    matcher = LLMatcher(LLTokenizer("byte"), guidance_grammar(kind, constraint), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def can_be_written(kind: str, constraint: str) -> Callable[[str], bool]:
    """Return a function that tells whether a text can be written, and end."""
    matcher = byte_matcher(kind, constraint)

    def accepts(text: str) -> bool:
        machine, tokens = matcher.deep_copy(), [*text.encode()]
        is_read = not tokens or machine.try_consume_tokens(tokens) == len(tokens)
        return bool(is_read and machine.is_accepting())

    return accepts
