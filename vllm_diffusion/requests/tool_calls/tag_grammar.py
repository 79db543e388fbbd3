"""Structural tags whose calls are written in Lark, as one Lark grammar for llguidance.

vLLM limits a tag to one call, or joins it with a request's other constraint, so a tool parser has
to return xgrammar's object. The grammars in it are rules of Lark, which xgrammar cannot read: each
begins with a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_diffusion.requests.json_schema import SchemaError, guided_schema
from vllm_diffusion.requests.readers import guidance_problem
from vllm_diffusion.requests.tool_calls.leaf_values import escaped

# The first line of a grammar in Lark; its next line has the rule that it begins with.
MARK = "// llguidance"
_TOKENS = re.compile(r"<\[\^?[0-9,]+\]>")


def tag_grammar(text: str, white_space: str) -> str | None:
    """Return a structural tag as a Lark grammar; ``None`` if it has no call that is written in
    Lark.

    Args:
        text: The tag as JSON.
        white_space: Expression of what may follow a comma or a colon of a JSON answer.

    Raises:
        SchemaError: If it has parts that cannot stand beside such calls, or llguidance does not
            follow it.
    """
    if MARK not in text:
        return None
    try:
        form = json.loads(text)["format"]
        if not _has_calls(form):
            return None
        grammar = _Writer(white_space).grammar(form)
    except RecursionError:
        raise SchemaError("structural_tag is nested too deeply") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(
            f"structural_tag is malformed ({type(error).__name__}: {error})"
        ) from None
    # The check has a vocabulary of bytes.
    checked = _TOKENS.sub(
        lambda tokens: re.sub("[0-9]+", lambda token: str(int(token[0]) % 256), tokens[0]), grammar
    )
    if problem := guidance_problem("grammar", checked):
        raise SchemaError(f"the grammar of the tools is not followed: {problem}")
    return grammar


def _has_calls(form: Any) -> bool:
    pending = [form]
    while pending:
        part = pending.pop()
        if _is_call(part):
            return True
        if isinstance(part, (dict, list)):
            pending += part.values() if isinstance(part, dict) else part
    return False


def _is_call(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") == "grammar"
        and str(part.get("grammar")).startswith(MARK)
    )


class _Writer:
    """Lines of a grammar that are collected while the formats of a tag are written."""

    def __init__(self, white_space: str) -> None:
        self._white_space = white_space
        # Tools have lines in common, which are written once.
        self._lines: dict[str, None] = {}

    def grammar(self, form: Mapping[str, Any]) -> str:
        start = f"start: {self._format(form)}"
        return "\n".join([start, *self._lines])

    def _format(self, form: Mapping[str, Any]) -> str:
        kind = form["type"]
        if _is_call(form):
            _, *lines = form["grammar"].splitlines()
            self._lines |= dict.fromkeys(lines)
            return str(lines[0].split(":")[0])
        if kind == "tag":
            begin, end = form["begin"]["token"], form["end"]["token"]
            return f"{_token(begin)} {self._format(form['content'])} {_token(end)}"
        if kind == "token_triggered_tags":
            free = f"<[^{','.join(str(int(i)) for i in form['trigger_tokens'] + form['exclude_tokens'])}]>"
            call = self._any_of(form["tags"])
            if form.get("stop_after_first"):
                return f"{free}* {call}{'' if form.get('at_least_one') else '?'}"
            first = f"{free}* {call} " if form.get("at_least_one") else ""
            return f"{first}({free} | {call})*"
        if kind == "tags_with_separator" and not form["separator"]:
            call = self._any_of(form["tags"])
            most = "" if form.get("stop_after_first") else "+"
            return f"{call}{most}" if form.get("at_least_one") else f"({call}{most})?"
        if kind == "or":
            return self._any_of(form["elements"])
        if kind == "json_schema" and form.get("style", "json") == "json":
            return self._rule(f"%json {guided_schema(form['json_schema'], self._white_space)}")
        if kind == "regex" and not form.get("excludes"):
            return self._rule(_expression(form["pattern"]))
        if kind == "const_string":
            return self._constants([form])
        if kind == "grammar":
            raise SchemaError(
                "a grammar in EBNF cannot be held beside tools; leave one of them out, or set "
                "tool_choice to none"
            )
        raise SchemaError(
            f"structural_tag has a part of type {kind!r}, which cannot stand beside tools"
        )

    def _any_of(self, forms: Sequence[Mapping[str, Any]]) -> str:
        # A rule has at most 2,000 alternatives, an expression more.
        constants = [form for form in forms if form["type"] == "const_string"]
        written = [self._format(form) for form in forms if form["type"] != "const_string"]
        if constants:
            written.append(self._constants(constants))
        return f"({' | '.join(written)})"

    def _constants(self, forms: Iterable[Mapping[str, Any]]) -> str:
        return self._rule(f"/{'|'.join(escaped(form['value']) for form in forms)}/")

    def _rule(self, body: str) -> str:
        name = f"answer_{len(self._lines)}"
        self._lines[f"{name}: {body}"] = None
        return name


def _token(token: Any) -> str:
    return f"<[{int(token)}]>"


def _expression(pattern: str) -> str:
    """Return an expression between slashes."""
    written = re.sub(
        r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], pattern, flags=re.S
    )
    return "/" + written.replace("\n", "\\n").replace("\r", "\\r") + "/"
