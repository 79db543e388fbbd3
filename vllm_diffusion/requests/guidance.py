"""llguidance, which compiles JSON schemas, expressions, choices and Lark grammars, and xgrammar,
which compiles EBNF: what they are given and refuse.

Both processes use them: the API process to refuse what they do not follow, in processes that it can
give up (``readers.py``), the engine to follow the rest.
"""

import functools
import json
import re
from typing import Any

GUIDANCE = "guidance"
# A kind of constraint besides those of llguidance.
EBNF = "ebnf"
_MOST_OF_A_REASON = 300


def guidance_grammar(kind: str, text: str) -> str:
    """Return llguidance's form of a constraint.

    Args:
        kind: ``"json"``, ``"regex"``, ``"choice"`` or ``"grammar"`` (Lark).
        text: A schema as JSON, an expression, a list of strings as JSON, or a grammar.

    Raises:
        ValueError: If it has none.
    """
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "choice":
        # llguidance has at most 2,000 alternatives of a rule, and more of an expression.
        escaped = (
            re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", choice) for choice in json.loads(text)
        )
        kind, text = "regex", "|".join(f"(?:{choice})" for choice in escaped)
    return grammar_from("lark" if kind == "grammar" else kind, text)  # type: ignore[arg-type]


def compile_problem(kind: str, text: str) -> str | None:
    """Return why a constraint is not followed, in one line; ``None`` if it is.

    Besides compiling it, a token is read and taken back, as canvases need it. It takes as long as
    it takes: of what a client sent, ``readers.py`` asks.
    """
    if kind == EBNF:
        return _ebnf_problem(text)
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(_byte_tokenizer(), guidance_grammar(kind, text), log_level=0)
    except ValueError as error:
        return _one_line(str(error))
    if not matcher.get_error():
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if allowed and not matcher.is_error():
            # The first of them.
            matcher.consume_token((allowed & -allowed).bit_length() - 1)
            matcher.rollback(1)
    return _one_line(matcher.get_error())


def _ebnf_problem(text: str) -> str | None:
    from xgrammar import Grammar, GrammarCompiler, TokenizerInfo

    # A grammar takes most of its time and memory without a model's vocabulary.
    vocabulary = TokenizerInfo([bytes([i]) for i in range(256)], stop_token_ids=[0])
    try:
        GrammarCompiler(vocabulary, max_threads=1).compile_grammar(Grammar.from_ebnf(text))
    except RuntimeError as error:
        return str(error)[:_MOST_OF_A_REASON]
    return None


@functools.cache
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _one_line(error: str) -> str | None:
    """Return an error of llguidance's without its carets, its state and its options."""
    lines = [line.strip() for line in error.split("<state>")[0].splitlines()]
    reason = " ".join(line for line in lines if line.strip("^ |")).split(" Enable ")[0]
    if reason == "NoExtensionBias":
        return "no text satisfies it"
    return reason[:_MOST_OF_A_REASON] or None
