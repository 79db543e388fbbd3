"""Structural tags in llguidance have the texts that they have in xgrammar, whose form they are."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import xgrammar

from tests.support.oracles.written import can_be_written
from vllm_diffusion.requests.json_schema import SchemaError
from vllm_diffusion.requests.tool_calls.tag_grammar import tag_grammar

Form = Mapping[str, Any]
END = 256


def kind(name: str, **fields: Any) -> Form:
    return {"type": name, **fields}


def tag(begin: str, content: Form, end: str | Sequence[str]) -> Form:
    return kind("tag", begin=begin, content=content, end=end)


def sequence(*elements: Form) -> Form:
    return kind("sequence", elements=elements)


def text(value: str) -> Form:
    return kind("const_string", value=value)


def regex(pattern: str) -> Form:
    return kind("regex", pattern=pattern)


INTEGER = kind("json_schema", json_schema={"type": "integer"})
ANY = kind("any_text")
TAGS = [tag("<a>", regex("[0-9]+"), "</a>"), tag("<ab>", INTEGER, "</ab>")]
TRIGGERED = kind("triggered_tags", triggers=["<a"], tags=TAGS)
SEPARATED = kind("tags_with_separator", tags=TAGS)
FLAGS = [
    {"at_least_one": one, "stop_after_first": first}
    for one in (False, True)
    for first in (False, True)
]
ONE, TWO = "<a>1</a>", "<ab>12</ab>"
WITH_CALLS = (
    *("", "x", ONE, TWO, f"x{ONE}", f"{ONE}x", ONE + TWO, f"x{ONE}y{TWO}z", f"{ONE},{TWO}"),
    *(f"{ONE},", "<a>x</a>", "<ab>1</a>", f"{ONE} <a"),
)
CASES: list[tuple[Form, Sequence[str]]] = [
    (text('ab/\n"'), ["", 'ab/\n"', "ab"]),
    (text(""), ["", "a"]),
    (sequence(text(""), text("a")), ["", "a"]),
    (regex("[a-z<]+"), ["", "ab<"]),
    (regex("a|b"), ["a", "b", "ab"]),
    (regex(r"\d/\s"), ["1/ ", "aa "]),
    (ANY, ["", "x\ny"]),
    (kind("any_text", max_chars=3), ["", "abc", "abcd"]),
    (kind("any_text", excludes=["no"]), ["yes", "n", "ano", "nxo"]),
    (sequence(regex("[a-z]*"), text("k"), regex("[0-9]?")), ["k", "abk", "abkk1", "ab"]),
    (sequence(INTEGER, text(";"), INTEGER), ["1;2", "12;", "1"]),
    (
        kind(
            "or", elements=[text("a"), text("ab"), regex("[0-9]{2}"), sequence(text("x"), INTEGER)]
        ),
        ["a", "ab", "12", "x5", "x", "abc"],
    ),
    (tag("[", regex(r"[a-z<\]]+"), "]"), ["[a]", "[]", "[a]]", "[a"]),
    (tag("[", ANY, "]"), ["[]", "[x]", "[x]]", "[x"]),
    (tag("[", ANY, ["]", "!!"]), ["[]", "[x!]", "[x!!", "[x]]", "[a!!b]"]),
    (tag("", ANY, "</t>"), ["</t>", "a</t>", "a</t>b", "a</t"]),
    (tag("[", INTEGER, ["]", "}"]), ["[1]", "[1}", "[a]"]),
    (tag("[", TRIGGERED, "]"), ["[]", f"[{ONE}]", f"[x{ONE}y]", "[x]]", f"[{ONE}]x"]),
    (sequence(tag("<t>", ANY, "</t>"), TRIGGERED), [f"<t>x{ONE}</t>y{ONE}", "<t></t>", "<t>", ONE]),
    *[({**TRIGGERED, **flags}, WITH_CALLS) for flags in FLAGS],
    ({**TRIGGERED, "excludes": ["z"]}, WITH_CALLS),
    *[({**SEPARATED, "separator": ",", **flags}, WITH_CALLS) for flags in FLAGS],
    *[({**SEPARATED, "separator": "", **flags}, WITH_CALLS) for flags in FLAGS],
    (kind("optional", content=text("a")), ["", "a", "aa"]),
    (kind("star", content=regex("a|bc")), ["", "a", "abca", "b"]),
    (kind("plus", content=sequence(text("a"), INTEGER)), ["", "a1", "a1a2", "a"]),
    (kind("repeat", min=2, max=3, content=text("ab")), ["ab" * count for count in range(1, 5)]),
    (kind("repeat", min=1, max=-1, content=text("a")), ["", "a", "aaaaa"]),
    (
        kind("dispatch", rules=[["<q>", regex("[0-9]")], ["<r>", INTEGER]], excludes=["no"]),
        ["", "x", "<q>1", "<q>x", "a<q>1b<r>12c", "no", "<q"],
    ),
    (kind("dispatch", rules=[["<q>", regex("[0-9]")]], loop=False), ["x", "a<q>1", "<q>1b", "<q"]),
]


@functools.cache
def compiler() -> Any:
    tokens = [*[bytes([i]) for i in range(256)], b"</s>"]
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    )


def written(form: Form) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def of_xgrammar(form: Form, answer: str) -> bool:
    """Return true if an answer may be written, and end, by xgrammar."""
    grammar = compiler().compile_grammar(xgrammar.Grammar.from_structural_tag(written(form)))
    machine = xgrammar.GrammarMatcher(grammar)
    return machine.accept_string(answer) and machine.accept_token(END)


@pytest.mark.parametrize(("form", "answers"), CASES, ids=lambda value: str(value)[:60])
def test_answers(form: Form, answers: Sequence[str]) -> None:
    """A tag has the same answers by both: some of them are valid, or begin one that is."""
    accepts = can_be_written("grammar", tag_grammar(written(form), " ?"))
    for answer in answers:
        assert accepts(answer) == of_xgrammar(form, answer), answer


def test_excluded_at_the_end() -> None:
    """A text that an expression excludes stands nowhere; xgrammar lets it stand at the end."""
    grammar = tag_grammar(written({**regex("[a-z]*"), "excludes": ["no"]}), " ?")
    answers = filter(can_be_written("grammar", grammar), ("yes", "noe", "ano", "no"))
    assert [*answers] == ["yes"]


def test_older_form() -> None:
    """A tag in vLLM's older form is read as one with triggers, its JSON with little white space."""
    older = {"begin": "<a>", "schema": {"type": "array", "items": {"type": "null"}}, "end": "</a>"}
    grammar = tag_grammar(json.dumps({"structures": [older], "triggers": ["<a"]}), " ?")
    answers = [
        "x<a>[null, null]</a>y",
        "<a>[null,  null]</a>",
        "<a>[null,\nnull]</a>",
        "<a>[ ]</a>",
    ]
    assert [*filter(can_be_written("grammar", grammar), answers)] == answers[:1]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (sequence(ANY, text("k")), "text without an end before another part"),
        (kind("star", content=ANY), "text without an end that is repeated"),
        (kind("any_text", max_tokens=3), "max_tokens, which is not supported"),
        (
            kind("grammar", grammar='root ::= "a"'),
            "EBNF cannot be combined with tools or a structural tag",
        ),
        (kind("json_schema", json_schema={}, style="qwen_xml"), "style='qwen_xml'"),
        (kind("json_schema", json_schema={"not": {}}), "#/not is not supported"),
        (kind("triggered_tags", triggers=["<b"], tags=TAGS), "'<b', that begins no tag"),
        (regex("(("), "invalid regex"),
        (kind("tag"), "malformed"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals(form: Form, words: str) -> None:
    """What is not followed is refused with its name."""
    with pytest.raises(SchemaError) as refused:
        tag_grammar(written(form), " ?")
    assert words in str(refused.value)
