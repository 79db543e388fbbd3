"""Structural tags as Lark grammars for llguidance.

Parsers of tool calls make xgrammar's structural tags of a request's tools, and a client may send
one. xgrammar's own compiler drops keywords of a schema that it does not know, and takes the third
power of an expression's length, with no limit. Calls of Gemma's come as rules of Lark within the
tag, which xgrammar cannot read: each begins with a mark.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_diffusion.requests.json_schema import SchemaError, guided_schema
from vllm_diffusion.requests.readers import compiling_problem
from vllm_diffusion.requests.tool_calls.leaf_values import escaped

# The first line of a grammar in Lark; its next line has the rule that it begins with.
MARK = "// llguidance"
_TOKENS = re.compile(r"<\[\^?[0-9,]+\]>")
_TIMES = {"optional": "?", "star": "*", "plus": "+"}
# Formats in which any text may stand, up to what ends the tag that holds them.
_FREE = ("any_text", "triggered_tags", "dispatch")
_NOT_SUPPORTED = "structural_tag has a part with {}, which is not supported"


def tag_grammar(text: str, white_space: str) -> str:
    """Return a structural tag as a Lark grammar.

    Args:
        text: The tag as JSON, in xgrammar's form or in vLLM's older one, ``structures`` and
            ``triggers``.
        white_space: Expression of what may follow a comma or a colon of a JSON answer.

    Raises:
        SchemaError: If it is none, or has a part that is not followed.
    """
    try:
        tag = json.loads(text)
        form = _in_new_form(tag) if "structures" in tag else tag["format"]
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
    if problem := compiling_problem("grammar", checked):
        raise SchemaError(f"structural_tag is not supported: {problem}")
    return grammar


def _in_new_form(tag: Mapping[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"]},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


@dataclass(frozen=True)
class _Part:
    """What a format is written as.

    Attributes:
        text: An expression of rules; of terminals alone if the part is regular.
        is_regular: True if it has neither JSON nor tokens. A terminal is read as far as it goes, so
            regular parts that follow one another have to be one.
        is_open: True if it has no end, so that nothing can follow it.
    """

    text: str
    is_regular: bool = True
    is_open: bool = False


class _Writer:
    """Lines of a grammar that are collected while the formats of a tag are written."""

    def __init__(self, white_space: str) -> None:
        self._white_space = white_space
        # Tools have lines in common, which are written once.
        self._lines: dict[str, None] = {}

    def grammar(self, form: Mapping[str, Any]) -> str:
        start = f"start: {self._in_rule(self._joined(self._parts(form)))}"
        return "\n".join([start, *self._lines])

    def _parts(self, form: Mapping[str, Any]) -> list[_Part]:
        """Write a format as parts that follow one another."""
        kind = form["type"]
        if kind == "sequence":
            return [part for element in form["elements"] for part in self._parts(element)]
        if kind == "tag":
            return self._tag(form, form["begin"])
        return [self._part(form, kind)]

    def _part(self, form: Mapping[str, Any], kind: str) -> _Part:
        if kind == "grammar":
            if not str(form.get("grammar")).startswith(MARK):
                raise SchemaError(
                    "a grammar in EBNF cannot be combined with tools or a structural tag; leave one "
                    "of them out, or set tool_choice to none"
                )
            _, *lines = form["grammar"].splitlines()
            self._lines |= dict.fromkeys(lines)
            return _Part(str(lines[0].split(":")[0]), is_regular=False)
        if kind in _FREE:
            return self._free(form)
        if kind == "const_string":
            return _constants([form["value"]])
        if kind == "regex":
            return self._terminal(_expression(form["pattern"]), form.get("excludes"))
        if kind == "json_schema":
            return self._json(form)
        if kind == "token":
            return _Part(_tokens([form["token"]]), is_regular=False)
        if kind == "or":
            return self._one_of(form["elements"])
        if kind in _TIMES:
            return self._times(self._joined(self._parts(form["content"])), _TIMES[kind])
        if kind == "repeat":
            low, high = int(form["min"]), int(form["max"])
            times = f"{{{low},{'' if high < 0 else high}}}"
            return self._times(self._joined(self._parts(form["content"])), times)
        if kind == "tags_with_separator":
            return self._separated(form)
        if kind == "token_triggered_tags":
            return self._triggered_by_tokens(form)
        raise SchemaError(_NOT_SUPPORTED.format(f"the type {kind!r}"))

    def _tag(self, form: Mapping[str, Any], begin: Any) -> list[_Part]:
        content, end = form["content"], form["end"]
        if content["type"] in _FREE and not isinstance(end, Mapping):
            return [self._mark(begin), self._free(content, _texts(end))]
        return [self._mark(begin), *self._parts(content), self._mark(end)]

    def _mark(self, mark: Any) -> _Part:
        """Write what begins or ends a tag."""
        if isinstance(mark, Mapping):
            return self._part(mark, mark["type"])
        return _constants(_texts(mark))

    def _json(self, form: Mapping[str, Any]) -> _Part:
        for field, usual in (("style", "json"), ("excludes", [])):
            if form.get(field, usual) != usual:
                raise SchemaError(_NOT_SUPPORTED.format(f"{field}={form[field]!r}"))
        schema = guided_schema(form["json_schema"], self._white_space)
        return _Part(self._line("answer", f"%json {schema}"), is_regular=False)

    def _separated(self, form: Mapping[str, Any]) -> _Part:
        call = self._one_of(form["tags"])
        if not form.get("stop_after_first"):
            further = self._joined([_constants([form["separator"]]), call])
            call = self._joined([call, self._times(further, "*")])
        return call if form.get("at_least_one") else self._times(call, "?")

    def _triggered_by_tokens(self, form: Mapping[str, Any]) -> _Part:
        free = _tokens([*form["trigger_tokens"], *form["exclude_tokens"]], "^")
        call = self._in_rule(self._one_of(form["tags"]))
        first = f"{free}* {call} " if form.get("at_least_one") else ""
        text = f"{first}({free} | {call})*"
        if form.get("stop_after_first"):
            text = f"{free}* {call}{'' if form.get('at_least_one') else '?'}"
        return _Part(text, is_regular=False, is_open=True)

    def _free(self, form: Mapping[str, Any], ends: Sequence[str] = ()) -> _Part:
        """Write text in which anything may stand but what is excluded, and calls where a text
        triggers them, up to one of some ends.
        """
        if form.get("max_tokens") is not None:
            raise SchemaError(_NOT_SUPPORTED.format("max_tokens"))
        called = self._called(form)
        never = [*ends, *form.get("excludes", ()), *called]
        last = self._text(ends, never, form.get("max_chars"))
        if not called:
            return last
        first = self._one_of(form["tags"]) if form.get("at_least_one") else _constants([""])
        call = self._any_of(
            [self._joined([self._text([trigger], never), rest]) for trigger, rest in called.items()]
        )
        if not form.get("stop_after_first", not form.get("loop", True)):
            return self._joined([first, self._times(call, "*"), last])
        end = _constants(ends or [""])
        if form.get("at_least_one"):
            return self._joined([first, end])
        return self._any_of([last, self._joined([call, end])])

    def _called(self, form: Mapping[str, Any]) -> dict[str, _Part]:
        """Write what follows each text that triggers it."""
        if form["type"] == "dispatch":
            return {text: self._joined(self._parts(rest)) for text, rest in form["rules"]}
        called = {}
        for trigger in form.get("triggers", ()):
            begun = [tag for tag in form["tags"] if tag["begin"].startswith(trigger)]
            if not trigger or not begun:
                raise SchemaError(f"structural_tag has a trigger, {trigger!r}, that begins no tag")
            rests = [self._tag(tag, tag["begin"][len(trigger) :]) for tag in begun]
            called[trigger] = self._any_of([self._joined(rest) for rest in rests])
        return called

    def _text(
        self, ends: Sequence[str], never: Sequence[str], most_chars: int | None = None
    ) -> _Part:
        """Write any text up to the first of some ends, which has nothing else that it must not."""
        many = "*" if most_chars is None else f"{{0,{int(most_chars)}}}"
        has_end = any(ends)
        text = self._terminal(f"/(?s:.{many}{_either(ends)})/", never, "+" if has_end else "*")
        return text if has_end else replace(text, is_open=True)

    def _joined(self, parts: Sequence[_Part]) -> _Part:
        """Write parts that follow one another."""
        parts = [part for part in parts if part != _NOTHING] or [_NOTHING]
        if any(part.is_open for part in parts[:-1]):
            raise SchemaError("structural_tag has text without an end before another part")
        if len(parts) == 1:
            return parts[0]
        runs = [list(run) for _, run in itertools.groupby(parts, lambda part: part.is_regular)]
        texts = [" ".join(part.text for part in run) for run in runs]
        if len(runs) > 1:
            texts = [
                self._in_rule(_Part(text, run[0].is_regular))
                for text, run in zip(texts, runs, strict=True)
            ]
        is_regular = len(runs) == 1 and runs[0][0].is_regular
        return _Part(f"({' '.join(texts)})", is_regular, parts[-1].is_open)

    def _one_of(self, forms: Sequence[Mapping[str, Any]]) -> _Part:
        # A rule has at most 2,000 alternatives, an expression more.
        constants = [form["value"] for form in forms if form["type"] == "const_string"]
        written = [
            self._joined(self._parts(form)) for form in forms if form["type"] != "const_string"
        ]
        return self._any_of([*written, *([_constants(constants)] if constants else [])])

    def _any_of(self, parts: Sequence[_Part]) -> _Part:
        if len(parts) == 1:
            return parts[0]
        is_regular = all(part.is_regular for part in parts)
        texts = [part.text if is_regular else self._in_rule(part) for part in parts]
        return _Part(f"({' | '.join(texts)})", is_regular, any(part.is_open for part in parts))

    def _times(self, part: _Part, times: str) -> _Part:
        if part.is_open and times != "?":
            raise SchemaError("structural_tag has text without an end that is repeated")
        return replace(part, text=f"({part.text}){times}")

    def _terminal(self, text: str, never: Sequence[str] | None, after: str = "*") -> _Part:
        """Write an expression as a terminal, without texts that have something after them."""
        if never and any(never):
            text += f" & ~/(?s:.*{_either(never, is_optional=False)}.{after})/"
        return _Part(self._line("ANSWER", text))

    def _in_rule(self, part: _Part) -> str:
        """Return the text of a part within a rule, where a regular one is one terminal."""
        if part.is_regular and not part.text.isidentifier():
            return self._line("ANSWER", part.text)
        return part.text

    def _line(self, name: str, body: str) -> str:
        name = f"{name}_{len(self._lines)}"
        self._lines[f"{name}: {body}"] = None
        return name


_NOTHING = _Part('""')


def _constants(texts: Sequence[str]) -> _Part:
    return _Part(f"/{_either(texts)}/") if any(texts) else _NOTHING


def _either(texts: Sequence[str], *, is_optional: bool = True) -> str:
    """Return the expression of one of some texts; it may be nothing where one of them is empty."""
    written = "|".join(escaped(text) for text in texts if text)
    return f"(?:{written})" + ("?" if is_optional and "" in texts and written else "")


def _texts(mark: Any) -> list[str]:
    return [mark] if isinstance(mark, str) else list(mark)


def _tokens(tokens: Sequence[Any], sign: str = "") -> str:
    return f"<[{sign}{','.join(str(int(token)) for token in tokens)}]>"


def _expression(pattern: str) -> str:
    """Return an expression between slashes."""
    written = re.sub(
        r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], pattern, flags=re.S
    )
    return "/" + written.replace("\n", "\\n").replace("\r", "\\r") + "/"
