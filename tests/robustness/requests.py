"""The requests of a campaign: every field that means something for a canvas, legal and not.

Three kinds are mixed. A *valid* request must be answered. An *edge* request has a number, a list or
a combination at or beyond a bound, and is answered or refused. A *hostile* one wants to do harm:
constraints that nothing satisfies, bodies that are no request, images that are none, wrong types
from the server's own OpenAPI description.

Each request is drawn by itself from a seed and its number. Hypothesis, which varies what it drew
before in search of one failure, repeats itself too much for that: of 500 requests it made 48
hostile ones of two sorts, where a fifth was requested. It searches the door instead
(``test_door.py``).
"""

import base64
import functools
import io
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.pairs.fields import CHAT, COMPLETIONS, TOOL
from tests.robustness.described import json_of, request_schemas
from vllm_diffusion.requests.json_schema import CONSTRAINING, NOTES

Fields = Mapping[str, Callable[[random.Random], Any]]
Posted = tuple[str, Any]
# How often each kind is drawn, of ten.
KINDS = ("valid",) * 5 + ("edge",) * 3 + ("hostile",) * 2
DECISIONS = "/v1/decisions"


@dataclass(frozen=True)
class Served:
    """The requests that the server accepts.

    Attributes:
        canvas_length: Its canvas width in tokens.
        vocab_size: Number of token ids.
        max_model_len: Tokens of a prompt and its answer.
        images: Whether it takes any.
        openapi: Its description of itself.
        has_priorities: Requests of lower ``priority`` go first, and may have others preempted.
    """

    canvas_length: int
    vocab_size: int
    max_model_len: int
    images: bool
    openapi: dict[str, Any]
    has_priorities: bool = False


@dataclass(frozen=True)
class Request:
    """One request, and when its client loses patience.

    Attributes:
        kind: ``"valid"``, ``"edge"`` or ``"hostile"``.
        path: Where it is posted.
        body: JSON, or text that is sent as it is.
        leaves_after: Seconds after which the client closes its connection; ``None`` if it waits.
    """

    kind: str
    path: str
    body: Any
    leaves_after: float | None = None


def draw_request(served: Served, seed: int, number: int) -> Request:
    """Return request ``number`` of a campaign, the same for the same seed and server."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choice(KINDS)
    path, body = {"valid": valid, "edge": edge, "hostile": hostile}[kind](served, rng)
    leaves_after = rng.choice([None] * 9 + [rng.choice([0.02, 0.2, 1.0])])
    if served.has_priorities and kind == "valid" and path in (CHAT, COMPLETIONS):
        body = {**body, "priority": rng.randint(-1, 1)}
    return Request(kind, path, body, leaves_after)


def some_of(fields: Fields, most: int, rng: random.Random) -> dict[str, Any]:
    """Return up to ``most`` of the fields."""
    names = rng.sample(sorted(fields), rng.randint(0, most))
    return {name: fields[name](rng) for name in names}


def _list(rng: random.Random, low: int, high: int, value: Callable[[random.Random], Any]) -> Any:
    return [value(rng) for _ in range(rng.randint(low, high))]


# --- Valid requests.

TEXTS = ("a", "Once upon a time", "What is 7+8?", "Reverse: stone", "Count from 1 to 9", "x" * 90)
REGEXES = ("[a-f]{3}-[0-9]{1,40}", "(yes|no)", "[a-z ]{5,60}", "[0-9]+", "a{5}", r"\d{2}:\d{2}")
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "string", "maxLength": 12},
    {"enum": ["red", "green", 3, None]},
)
GRAMMARS = ('root ::= "a" | "b" root', 'root ::= [0-9]+ ("," [0-9]+)*')
CHOICES = (["yes", "no"], ["one"], ["a", "ab", "abc"])
WORDS = (["e"], ["th", "15"], ["a", "b", "c"])


def _token_id(served: Served, rng: random.Random) -> int:
    """Return a token of ordinary text of the shipped checkpoint, and of any larger one."""
    return rng.randrange(24, min(served.vocab_size, 276))


def _sampling(served: Served) -> Fields:
    """Return fields that both kinds of completion have, within their bounds."""
    token_id = functools.partial(_token_id, served)

    def biases(rng: random.Random) -> dict[str, float]:
        return {str(token_id(rng)): rng.uniform(-100, 100) for _ in range(rng.randint(0, 5))}

    return {
        "temperature": lambda rng: rng.choice([0, 0.0, 0.3, 1, 1.5, 2.0]),
        "top_k": lambda rng: rng.randint(-1, 60),
        "top_p": lambda rng: rng.uniform(0.05, 1),
        "min_p": lambda rng: rng.uniform(0, 1),
        "presence_penalty": lambda rng: rng.uniform(-2, 2),
        "frequency_penalty": lambda rng: rng.uniform(-2, 2),
        "repetition_penalty": lambda rng: rng.uniform(0.5, 2),
        "logit_bias": biases,
        "allowed_token_ids": lambda rng: _list(rng, 1, 200, token_id),
        "min_tokens": lambda rng: rng.randint(0, 1),
        "ignore_eos": lambda rng: rng.random() < 0.7,
        "stop": lambda rng: rng.sample(["zz", "e", "\n", "12"], rng.randint(0, 4)),
        "stop_token_ids": lambda rng: _list(rng, 0, 5, token_id),
        "include_stop_str_in_output": lambda rng: rng.random() < 0.5,
        "skip_special_tokens": lambda rng: rng.random() < 0.5,
        "n": lambda rng: rng.randint(1, 3),
        "prompt_logprobs": lambda rng: rng.randint(0, 3),
        "return_token_ids": lambda rng: rng.random() < 0.5,
        "stream_interval": lambda rng: rng.randint(1, 50),
        "add_special_tokens": lambda rng: rng.random() < 0.5,
        "cache_salt": lambda rng: rng.choice(["salt", "pepper"]),
    }


def _canvas(served: Served) -> Fields:
    """Return ``vllm_xargs`` within their bounds; the server's own temperatures are 0.8 and 0.4."""
    return {
        "diffusion_canvas_length": lambda rng: rng.randint(1, served.canvas_length),
        "diffusion_entropy_bound": lambda rng: rng.uniform(0.01, 2),
        "diffusion_confidence_threshold": lambda rng: rng.uniform(0.001, 0.5),
        "diffusion_stability_threshold": lambda rng: rng.randint(0, 3),
        "diffusion_t_max": lambda rng: rng.uniform(0.8, 2),
        "diffusion_t_min": lambda rng: rng.uniform(0.05, 0.4),
        "diffusion_preset": lambda rng: rng.choice(["fast", "balanced", "quality"]),
    }


def _constraint(rng: random.Random) -> dict[str, Any]:
    """Return a constraint that vLLM's default back end supports."""
    kinds: dict[str, tuple[Any, ...]] = {
        "regex": REGEXES,
        "json": SCHEMAS,
        "grammar": GRAMMARS,
        "choice": CHOICES,
        "json_object": (True,),
    }
    kind = rng.choice(sorted(kinds))
    return {kind: rng.choice(kinds[kind])}


def _seeded_canvas(served: Served, rng: random.Random) -> dict[str, Any]:
    """Return a first canvas with some fixed positions."""
    width = rng.randint(1, served.canvas_length)
    return {
        "diffusion_canvas_length": width,
        "diffusion_seed_canvas": [_token_id(served, rng) for _ in range(width)],
        "diffusion_pinned": rng.sample(range(width), rng.randint(0, width)),
    }


@functools.cache
def picture(width: int = 24, height: int = 24, shade: int = 90, form: str = "PNG") -> str:
    """Return an image as a data URL."""
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 255 - shade, 40)).save(content, form)
    data = base64.b64encode(content.getvalue()).decode()
    return f"data:image/{form.lower()};base64,{data}"


def image_message(url: str) -> list[dict[str, Any]]:
    """Return a user's question about an image."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    return [{"role": "user", "content": parts}]


def _prompt(served: Served, rng: random.Random) -> Posted:
    """Return the path and the prompt's fields."""
    if served.images and rng.random() < 0.1:
        return CHAT, {"messages": image_message(picture(shade=30 * rng.randrange(8)))}
    if rng.random() < 0.3:
        token_id = functools.partial(_token_id, served)
        return COMPLETIONS, {"prompt": _list(rng, 1, served.max_model_len // 2, token_id)}
    text = rng.choice(TEXTS)
    if rng.random() < 0.4:
        return COMPLETIONS, {"prompt": text}
    return CHAT, {"messages": [{"role": "user", "content": text}]}


def _decision(rng: random.Random) -> Posted:
    """Return questions of every kind about one text, each with a canvas or all in one."""
    questions: list[dict[str, Any]] = [
        {"type": "predicate", "name": "blue", "instructions": rng.choice(TEXTS[:-1])},
        {
            "type": "choice",
            "name": "colour",
            "instructions": "What colour is it?",
            "choices": [{"value": "blue"}, {"value": "red", "description": "as in roses"}],
        },
        {
            "type": "score",
            "name": "certainty",
            "instructions": "How sure are you?",
            "levels": [{"label": label} for label in ("not", "rather", "very")],
        },
    ]
    asked = rng.sample(questions, rng.randint(1, len(questions)))
    # With the longest text three questions may leave no room for a canvas.
    body = {"input": rng.choice(TEXTS[:-1]), "questions": asked, "joint": rng.random() < 0.5}
    return DECISIONS, {"model": "tiny", **body}


def valid(served: Served, rng: random.Random) -> Posted:
    """Return a request that must be answered."""
    if rng.random() < 0.05:
        return _decision(rng)
    return valid_generation(served, rng)


def valid_generation(served: Served, rng: random.Random) -> Posted:
    """Return a request for text that must be answered."""
    path, body = _prompt(served, rng)
    most = rng.choice([3, served.canvas_length, served.max_model_len // 3])
    body |= {"max_tokens": rng.randint(1, most), **some_of(_sampling(served), 4, rng)}
    xargs = {"diffusion_max_steps": rng.randint(1, 4), **some_of(_canvas(served), 2, rng)}
    # Most of them, so that many answers can be compared.
    if rng.random() < 0.7:
        body["seed"] = rng.randrange(2**63)
    if rng.random() < 0.3:
        body["stream"] = True
    special = rng.choice(
        [None] * 6
        + ["constraint"] * 2
        + ["words", "read", "seeded", "logprobs", "tools", "format", "suffix"]
    )
    if special == "constraint":
        body["structured_outputs"] = _constraint(rng)
    elif special == "words":
        body["bad_words"] = rng.choice(WORDS)
    elif special == "seeded":
        xargs |= _seeded_canvas(served, rng)
        if allowed := body.get("allowed_token_ids"):
            pinned = (xargs["diffusion_seed_canvas"][i] for i in xargs["diffusion_pinned"])
            body["allowed_token_ids"] = [*allowed, *pinned]
    elif special == "logprobs":
        body |= _logprobs(path, rng.randint(0, 4))
    elif special == "read":
        xargs |= {"diffusion_read_only": True, "diffusion_constrained": True}
        body |= {"logprob_token_ids": [60, 61, 62], **_logprobs(path, 1)}
    elif special == "tools" and path == CHAT:
        body |= {"tools": [TOOL], "tool_choice": rng.choice(["required", "auto"])}
    elif special == "format" and path == CHAT:
        form = {"name": "x", "schema": rng.choice(SCHEMAS)}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    elif special == "suffix" and isinstance(body.get("prompt"), str):
        body |= {"suffix": rng.choice([", and so on", "9"]), "max_tokens": rng.randint(1, 8)}
        xargs.pop("diffusion_canvas_length", None)
    if special in ("constraint", "tools", "format"):
        # The grammar decides where the answer ends.
        for field in ("min_tokens", "ignore_eos", "stop_token_ids"):
            body.pop(field, None)
    return path, {**_agreeing(body), "vllm_xargs": xargs}


def _agreeing(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without fields that vLLM refuses together."""
    if "min_tokens" in body and "allowed_token_ids" in body:
        # What is allowed may be what ends it.
        body.pop("stop_token_ids", None)
    if "stream" in body:
        body.pop("prompt_logprobs", None)
    if body.get("temperature") == 0:
        body.pop("n", None)
    return body


def _logprobs(path: str, count: int) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": count} if path == CHAT else {"logprobs": count}


# --- Numbers, lists and combinations at a bound and beyond it.

INTEGERS = (
    *(0, -1, 1, 2, 127, 128, 1023, 1024, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), -(2**63) - 1, 10**40, 10**400),
)
FLOATS = (
    *(0.0, -0.0, 1e-45, 1e-39, 1e-38, 1e-320, 5e-324, 1e-7, 0.999999999, 1.0, 1.0000001),
    *(16777217.0, 3.4e38, 3.5e38, 1e39, 1e308, -1e39, -1.0),
    *(math.nan, math.inf, -math.inf),
)
OTHERS = (None, True, False, "", "3", "nan", [], {}, [1], [[]], {"a": 1}, "\x00", "\ud800")
NUMBERS = INTEGERS + FLOATS
NUMERIC_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "max_tokens", "seed", "n", "prompt_logprobs", "logprobs"),
    *("truncate_prompt_tokens", "priority", "stream_interval", "top_logprobs"),
    *("thinking_token_budget", "length_penalty", "max_completion_tokens"),
)
ID_LISTS = ("allowed_token_ids", "stop_token_ids", "logprob_token_ids", "prompt")
NUMERIC_XARGS = (
    *("diffusion_max_steps", "diffusion_canvas_length", "diffusion_stability_threshold"),
    *("diffusion_entropy_bound", "diffusion_confidence_threshold"),
    *("diffusion_t_min", "diffusion_t_max", "diffusion_read_only", "diffusion_constrained"),
)


# Where, which field, and values that are allowed there or might be.
_TINY = (1e-45, 1e-39, 1e-38, 5e-324, 1e-7)
_HUGE = (1e30, 3.4e38, 3.5e38, 1e39, 1e308)
EXTREMES: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("body", "temperature", (*_TINY, 0.0, -0.0, 2.0)),
    ("body", "top_p", (*_TINY, 1.0, 0.999999999)),
    ("body", "min_p", (*_TINY, 0.0, 1.0, 0.999999999)),
    ("body", "top_k", (1, 0, -1, 315, 316, 317, 2**31 - 1, 2**31)),
    ("body", "repetition_penalty", (*_TINY, *_HUGE, 1, 1e-30)),
    ("body", "presence_penalty", (-2, 2, 1e-45, -0.0)),
    ("body", "frequency_penalty", (-2, 2, 1e-45, -0.0)),
    ("body", "seed", (0, -1, 2**31, 2**32, 2**63 - 1, -(2**63))),
    ("body", "min_tokens", (0, 1, 2, 31, 32, 33)),
    ("body", "max_tokens", (1, 2, 31, 32, 33, 300, None)),
    ("body", "n", (1, 4, 9, 128, 129, 10_000)),
    ("body", "logprobs", (0, 1, 20, 21, True)),
    ("body", "stream_interval", (1, 2**31, 2**63)),
    ("vllm_xargs", "diffusion_max_steps", (1, 48, 2**31 - 1, 2**31, 2**63, 10**40)),
    ("vllm_xargs", "diffusion_canvas_length", (1, 2, 31, 32)),
    ("vllm_xargs", "diffusion_stability_threshold", (0, 1, 48, 2**31 - 1, 2**31, 2**63, 10**40)),
    ("vllm_xargs", "diffusion_entropy_bound", (*_TINY, *_HUGE)),
    ("vllm_xargs", "diffusion_confidence_threshold", (*_TINY, *_HUGE)),
    ("vllm_xargs", "diffusion_t_max", _HUGE),
    ("vllm_xargs", "diffusion_t_min", _TINY),
    # With more tokens at least than one canvas has.
    ("vllm_xargs", "diffusion_read_only", (True,)),
)


def _id_list(served: Served, rng: random.Random) -> list[Any]:
    last = served.vocab_size - 1
    return rng.choice(
        [
            *([0], [last], [last + 1], [-1], [2**31], [2**63], [1.5], [None], [True], ["5"], []),
            *([5] * 1025, list(range(1024)), list(range(last + 1)), [5] * 20_000, [1], [1, 6, 14]),
        ]
    )


def _edge_change(served: Served, rng: random.Random) -> tuple[str, str, Any]:
    """Return where to change (the body or its ``vllm_xargs``), which field, and its value."""
    texts = (*TEXTS, "", "\x00", "\ud800", "é" * 500, "<|tool_call>", "a" * 5000)
    draw = rng.random()
    if draw < 0.3:
        place, field, values = rng.choice(EXTREMES)
        return place, field, rng.choice(values)
    if draw < 0.45:
        return "body", rng.choice(NUMERIC_FIELDS), rng.choice(NUMBERS + OTHERS)
    if draw < 0.6:
        return "vllm_xargs", rng.choice(NUMERIC_XARGS), rng.choice(NUMBERS + OTHERS)
    if draw < 0.7:
        return "body", rng.choice(ID_LISTS), _id_list(served, rng)
    if draw < 0.75:
        name = rng.choice(["diffusion_seed_canvas", "diffusion_pinned"])
        return "vllm_xargs", name, _id_list(served, rng)
    if draw < 0.82:
        ids = [rng.choice([*INTEGERS, _token_id(served, rng)]) for _ in range(3)]
        return "body", "logit_bias", {str(token): rng.choice(NUMBERS) for token in ids}
    if draw < 0.9:
        return "body", rng.choice(["bad_words", "stop"]), rng.choices(texts, k=rng.randint(0, 6))
    if draw < 0.95:
        return "body", "structured_outputs", _constraint(rng)
    return "body", rng.choice(["ignore_eos", "echo", "watermarking"]), True


def edge(served: Served, rng: random.Random) -> Posted:
    """Return a valid request with one to three fields changed."""
    if rng.random() < 0.05:
        return _edge_decision(served, rng)
    path, body = valid_generation(served, rng)
    for _ in range(rng.randint(1, 3)):
        place, field, value = _edge_change(served, rng)
        (body if place == "body" else body[place])[field] = value
    return path, body


def _edge_decision(served: Served, rng: random.Random) -> Posted:
    """Return a decision with an arbitrary field of its description, or duplicate names."""
    path, body = _decision(rng)
    schema = request_schemas(served.openapi)[path]["$ref"].rsplit("/", 1)[1]
    field = rng.choice(sorted(served.openapi["components"]["schemas"][schema]["properties"]))
    if rng.random() < 0.3:
        return path, {**body, "questions": body["questions"] * rng.choice([0, 2, 40])}
    return path, {**body, field: _anything(rng)}


# --- Requests that want to do harm.

_BOMB: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {} for i in range(300)}}
_DEEP: dict[str, Any] = {"type": "string"}
for _ in range(60):
    _DEEP = {"type": "array", "items": _DEEP}
# What nothing satisfies, what is satisfied by no end, what takes long to compile, what is
# malformed.
HOSTILE_CONSTRAINTS: tuple[dict[str, Any], ...] = (
    *({"regex": r} for r in (r"[^\s\S]", r"ab[^\s\S]", "a{0}", "", "(a|b)*", "(", "a" * 5000)),
    *({"regex": r} for r in ("a{1,30000}", "(((a{9}){9}){9}){9}", r"(?=a)b", r"\1", "[\ud800]")),
    *(
        {"json": s}
        for s in ({"$ref": "#"}, {"$ref": "#/x"}, False, True, {"not": {}}, _BOMB, _DEEP)
    ),
    *({"json": s} for s in ({"enum": []}, {"allOf": [{"type": "string"}, {"type": "integer"}]})),
    {"json": {"type": "integer", "minimum": 5, "maximum": 1}},
    {"json": {"type": "array", "minItems": 2 * 10**7}},
    {"json": {"type": "string", "minLength": 10**6}},
    {"json": {"type": "string", "pattern": "(a+)+$"}},
    {"json": '{"type": "obj'},
    *({"grammar": g} for g in ('root ::= root "a"', "root ::= root", 'root ::= ""', "", "x")),
    {"grammar": 'root ::= "a" root'},
    *({"choice": c} for c in ([""], [], ["a", ""], [f"c{i}" for i in range(3000)], ["\ud800"])),
    {"regex": "a", "json": {}},
    {},
    {"structural_tag": "{}"},
    {"structural_tag": '{"structures": [], "triggers": []}'},
    {"json_object": False},
)
HARD_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"bad_words": ["a"]},
    {"bad_words": [chr(code) for code in range(33, 127)]},
    {"temperature": 2.0},
    {"temperature": 1e-30},
    {"repetition_penalty": 1e30},
    {"repetition_penalty": 1e-30},
    {"logit_bias": {str(token): -100 for token in range(20, 300)}},
    {"stop_token_ids": [88]},
    {"allowed_token_ids": [1]},
    {"allowed_token_ids": [50]},
    {"top_k": 1, "top_p": 1e-30},
    {"vllm_xargs": {"diffusion_t_max": 1e-38, "diffusion_t_min": 1e-39}},
    {"vllm_xargs": {"diffusion_t_max": 1e38}},
    {"vllm_xargs": {"diffusion_entropy_bound": 1e-45}},
)
BROKEN_BODIES = (
    *("", "{", "null", "[]", "5", '"text"', "{}", '{"model": "tiny"}', "\x00", "{'a': 1}"),
    *("[" * 5000, '{"a":' * 2000, '{"model": "tiny", "prompt": "a", "prompt": "b"}', "NaN"),
    '{"model": "other", "prompt": "a"}',
    '{"model": "tiny", "prompt": "a", "max_tokens": 1e999}',
    '{"model": "tiny", "prompt": "\\ud800", "max_tokens": 1}',
    '{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}',
)


_ODD_VALUES = (
    *(None, True, False, 0, -1, 1.5, 5, "", "x", "^a", [], {}, [5], ["a"]),
    *({"a": 5}, {"type": 5}, [{"type": "string"}]),
)


def _odd_schema(rng: random.Random, depth: int = 0) -> Any:
    """Return keywords of JSON Schema with values of any type."""
    schema: dict[str, Any] = {}
    known = sorted(CONSTRAINING | NOTES | {"nullable", "title"})
    for keyword in rng.sample(known, rng.randint(1, 3)):
        inner = _odd_schema(rng, depth + 1) if depth < 2 else {"type": "string"}
        odd = rng.choice(_ODD_VALUES)
        schema[keyword] = rng.choice([odd, inner, [inner], {"a": inner}])
    return {"type": "object", "properties": {"a": schema}} if rng.random() < 0.3 else schema


def _constrained(served: Served, rng: random.Random) -> Posted:
    """Return a constraint and settings that contradict each other or lead nowhere."""
    path, body = _prompt(served, rng)
    odd = {"json": _odd_schema(rng)}
    constraint = rng.choice([rng.choice(HOSTILE_CONSTRAINTS), _constraint(rng), odd])
    hard = rng.choice(HARD_SETTINGS)
    xargs = {"diffusion_max_steps": rng.randint(1, 4), **hard.get("vllm_xargs", {})}
    max_tokens = rng.randint(1, 3 * served.canvas_length)
    body |= {"max_tokens": max_tokens, "structured_outputs": constraint, **hard}
    return path, {**body, "vllm_xargs": xargs}


def _bad_image(served: Served, rng: random.Random) -> Posted:
    """Return a data URL of something else, or of a strange shape."""
    png = picture()
    url = rng.choice(
        [
            *("data:image/png;base64,", "data:image/png;base64,!!!!", "data:,", "data:"),
            *(png[: len(png) // 2], png.replace("image/png", "text/html"), png[:-9] + "AAAAAAAA="),
            *(picture(1, 1), picture(1, 3000), picture(2000, 2), picture(form="GIF")),
            "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(),
            "data:image/png;base64," + "A" * 40_000,
        ]
    )
    return CHAT, {"messages": image_message(url), "max_tokens": 4}


def _anything(rng: random.Random) -> Any:
    return rng.choice(NUMBERS + OTHERS)


def _described(served: Served, rng: random.Random) -> Posted:
    """Return a body of any endpoint made from its description, with some errors."""
    schemas = request_schemas(served.openapi)
    path = rng.choice(sorted(schemas))
    body = json_of(schemas[path], served.openapi, _anything, rng)
    if isinstance(body, dict):
        if rng.random() < 0.8:
            body["model"] = "tiny"
        # Else an answer is as long as the model allows.
        body.setdefault("max_output_tokens" if path == "/v1/responses" else "max_tokens", 4)
    return path, body


def _mistyped(served: Served, rng: random.Random) -> Posted:
    """Return a valid request with an arbitrary value in one field of its description."""
    path, body = valid_generation(served, rng)
    name = request_schemas(served.openapi)[path]["$ref"].rsplit("/", 1)[1]
    properties = served.openapi["components"]["schemas"][name]["properties"]
    field = rng.choice(sorted(properties))
    if rng.random() < 0.5:
        return path, {**body, field: _anything(rng)}
    return path, {**body, field: json_of(properties[field], served.openapi, _anything, rng)}


def _broken(served: Served, rng: random.Random) -> Posted:
    """Return something that is not a request, or has no endpoint."""
    paths = (COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/tokenize", "/nowhere")
    return rng.choice(paths), rng.choice(BROKEN_BODIES)


def hostile(served: Served, rng: random.Random) -> Posted:
    """Return a request that tries to do harm."""
    makers = (_constrained, _constrained, _mistyped, _described, _broken, _bad_image)
    return rng.choice(makers)(served, rng)
