"""The fields of a request, each with a telling value and its own law.

A law looks at an answer and at nothing but its own field: an empty text if it holds. A new field
adds a value and a law here, and :mod:`tests.pairs.rows` puts it beside every other one.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from tests.pairs.answers import Answer, Choice

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 27]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "store", "description": "Store it.", "parameters": SCHEMA, "strict": True},
}
REGEX = "[a-c]{2,4}"
WORDS = ["red", "blue"]
# Ids of the shipped tokenizer: letters, and what ends an answer.
LETTERS = list(range(60, 110))
ENDS = [1, 6, 14]
BANNED, STOPPING = 70, 75

Law = Callable[[Mapping[str, Any], Choice, Answer], str]


def _holds(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    return ""


@dataclass(frozen=True)
class Value:
    """A value of a field, or of several that need one another.

    Attributes:
        name: What the pair is called by.
        body: Fields of the body; names that begin with ``diffusion_`` go to ``vllm_xargs``.
        law: What must hold of each choice.
        names: The names that the table of exclusions has for it; its own keys if none.
        paths: Paths that know it.
        streams: Whether it needs a stream, excludes one, or neither.
    """

    name: str
    body: Mapping[str, Any]
    law: Law = _holds
    names: Sequence[str] = ()
    paths: Sequence[str] = (CHAT, COMPLETIONS)
    streams: bool | None = None

    @property
    def fields(self) -> Sequence[str]:
        """Names of its fields, as refusals have them."""
        return self.names or tuple(self.body)


def one(name: str, value: Any, law: Law = _holds, **about: Any) -> list[Value]:
    """Return the only telling value of a field."""
    return [Value(name, {name: value}, law, **about)]


def _said(problem: bool, what: str) -> str:
    return what if problem else ""


def _stop(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    # Nothing stops an answer before its least length; a letter is a token, and so is "<...>".
    said = re.sub(
        rf"(?:<[^>]*>|.){{{sent.get('min_tokens', 0)}}}", "", choice.text, count=1, flags=re.DOTALL
    )
    if sent.get("include_stop_str_in_output") and choice.finish == "stop":
        said = said.removesuffix("e")
    return _said("e" in said, f"'e' stands in {choice.text!r}")


def _ends(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    return _said(STOPPING in choice.ids[:-1], f"{STOPPING} stands in {choice.ids}")


def _least(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    # A stop string is not a token.
    return _said(len(choice.ids) < 3 and "stop" not in sent, f"{len(choice.ids)} tokens")


def _goes_on(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    is_short = choice.finish == "stop" and not {"stop", "stop_token_ids"} & sent.keys()
    return _said(is_short, f"ended after {len(choice.ids)} tokens")


def _banned(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    return _said(BANNED in choice.ids, f"{BANNED} stands in {choice.ids}")


def _allowed(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    # As documented, a constraint goes before the ids, where it leaves none of them.
    if {"structured_outputs", "response_format", "tools"} & sent.keys():
        return ""
    others = {*choice.ids} - {*LETTERS, *ENDS}
    return _said(bool(others), f"{others} are not allowed")


def _schema(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    return "" if _is_cut(sent, choice) else _misfit(choice.text)


def _misfit(text: str) -> str:
    """Return why a text is not JSON of the schema, or nothing."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text!r}: {error}"
    return ""


def _is_cut(sent: Mapping[str, Any], choice: Choice) -> bool:
    """Return true if an answer may have ended before its constraint did."""
    return choice.finish != "stop" or "stop" in sent or "stop_token_ids" in sent


def _written(sent: Mapping[str, Any], choice: Choice) -> str:
    """Return an answer's text without what ends it, where that is shown."""
    is_shown = sent.get("skip_special_tokens") is False
    said = choice.text.partition("<")[0] if is_shown else choice.text
    # A letter.
    is_stop_shown = sent.get("include_stop_str_in_output") and choice.ids[-1:] == [STOPPING]
    return said[:-1] if is_stop_shown else said


def _regex(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    form = "[a-c]{0,4}" if _is_cut(sent, choice) else REGEX
    return _said(not re.fullmatch(form, _written(sent, choice)), f"{choice.text!r} is not {form}")


def _choice(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    cut, said = _is_cut(sent, choice), _written(sent, choice)
    fits = any(word.startswith(said) if cut else word == said for word in WORDS)
    return _said(not fits, f"{choice.text!r} is none of {WORDS}")


def _called(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    if choice.finish not in ("stop", "tool_calls") or {"stop", "stop_token_ids"} & sent.keys():
        return ""
    if not choice.calls:
        return f"no call in {choice.text!r}"
    return "".join(_misfit(call["arguments"]) for call in choice.calls)


def _logprobs(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    if len(choice.logprobs) != len(choice.ids) and not sent.get("echo"):
        return f"{len(choice.logprobs)} log-probabilities of {len(choice.ids)} tokens"
    high = [value for value in choice.logprobs if value is not None and value > 1e-4]
    return _said(bool(high), f"log-probabilities {high}")


def _prompt_logprobs(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    num_prompt = answer.usage["prompt_tokens"]
    found = answer.num_prompt_logprobs
    return _said(found not in (None, num_prompt), f"{found} of a prompt of {num_prompt}")


def _step_map(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    steps = choice.steps
    if len(steps) != len(choice.ids):
        return f"{len(steps)} steps of {len(choice.ids)} tokens"
    # A constraint may take more steps than the cap.
    is_free = not {"bad_words", "structured_outputs", "response_format", "tools"} & sent.keys()
    most = sent.get("diffusion_max_steps") if is_free else None
    return _said(most is not None and max(steps, default=0) > most, f"steps {steps}")


def _frames(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    return _said(answer.num_frames == 0, "no frame")


def _trace(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    return _said(not choice.trace, "no trace")


def _predicted(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    details = answer.usage.get("completion_tokens_details") or {}
    counts = [details.get(f"{kind}_prediction_tokens") for kind in ("accepted", "rejected")]
    if None in counts:
        return f"usage {answer.usage}"
    return _said(counts[0] > answer.usage["completion_tokens"], f"accepted {counts[0]}")


def _suffixed(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    details = answer.usage.get("completion_tokens_details") or {}
    return _said(not details.get("suffix_tokens"), f"usage {answer.usage}")


def _pinned(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    # Positions of a block that the prompt fills stand before the answer.
    seed, first = sent["diffusion_seed_canvas"], sent["given"](answer.usage["prompt_tokens"])
    of_answer = {i - first: seed[i] for i in (1, 2) if i >= first}
    wrong = [i for i, token in of_answer.items() if choice.ids[i : i + 1] not in ([], [token])]
    return _said(bool(wrong), f"pins {wrong} of {choice.ids}")


def _read(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    return _said(len(choice.ids) > sent["canvas"], f"{len(choice.ids)} tokens of one canvas")


def _echoed(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    # With return_token_ids vLLM echoes the prompt's ids in place of its text, once an answer.
    wanted = answer.usage["prompt_tokens"] * len(answer.choices)
    return _said(answer.num_prompt_ids != wanted, f"{answer.num_prompt_ids} ids of {wanted}")


def _truncated(sent: Mapping[str, Any], choice: Choice, answer: Answer) -> str:
    return _said(answer.usage["prompt_tokens"] > 6, f"usage {answer.usage}")


def fields_of(canvas: int) -> list[list[Value]]:
    """Return the telling values of each field of a server, besides that it is left out.

    Args:
        canvas: Positions of its canvases.
    """
    # Tokens that a request brings are not drawn: none of those that another field forbids.
    seed = [80 + i % 20 for i in range(canvas)]
    chat, text = {"paths": (CHAT,)}, {"paths": (COMPLETIONS,)}
    of_logprobs, constraint = {"names": ["logprobs"]}, ["structured_outputs"]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    required = {"tools": [TOOL], "tool_choice": "required"}
    predicted = {"type": "content", "content": "abcab"}
    return [
        one("temperature", 0.7),
        one("top_k", 5),
        one("top_p", 0.8),
        one("min_p", 0.05),
        one("presence_penalty", 0.5),
        one("frequency_penalty", 0.5),
        one("repetition_penalty", 1.2),
        one("logit_bias", {str(BANNED): -100, "71": 2}, _banned),
        one("allowed_token_ids", [*LETTERS, *ENDS], _allowed),
        one("bad_words", ["k"]),
        one("min_tokens", 3, _least),
        one("ignore_eos", True, _goes_on),
        one("stop", ["e"], _stop),
        one("stop_token_ids", [STOPPING], _ends),
        one("include_stop_str_in_output", True),
        one("skip_special_tokens", False),
        # vLLM takes several answers only where they are drawn.
        [Value("n", {"n": 2, "temperature": 0.7})],
        one("prompt_logprobs", 1, _prompt_logprobs, streams=False),
        one("echo", True, _echoed, **text),
        one("truncate_prompt_tokens", 6, _truncated),
        one("cache_salt", "grain"),
        one("thinking_token_budget", 4),
        [
            Value(
                "logprobs", {"logprobs": True, "top_logprobs": 3}, _logprobs, **of_logprobs, **chat
            ),
            Value("logprobs of text", {"logprobs": 3}, _logprobs, **of_logprobs, **text),
        ],
        [
            Value("schema", {"response_format": form}, _schema, [*constraint, "response_format"]),
            Value("regex", {"structured_outputs": {"regex": REGEX}}, _regex, constraint),
            Value("choice", {"structured_outputs": {"choice": WORDS}}, _choice, constraint),
            Value("tool", required, _called, [*constraint, "tools"], **chat),
        ],
        one("suffix", " ok", _suffixed, **text),
        [
            Value("prediction", {"prediction": predicted}, _predicted),
            Value(
                "the prompt",
                {"diffusion_prediction": "prompt"},
                _predicted,
                ["prediction", "diffusion_prediction"],
            ),
        ],
        # Refused alone where the server serves in order, and by models without presets.
        one("priority", 1),
        one("diffusion_preset", "fast"),
        one("diffusion_max_steps", 3),
        one("diffusion_canvas_length", canvas // 2),
        [
            Value("seed canvas", {"diffusion_seed_canvas": seed}),
            Value("pins", {"diffusion_seed_canvas": seed, "diffusion_pinned": [1, 2]}, _pinned),
        ],
        one("diffusion_read_only", True, _read),
        [
            Value(
                "constrained",
                {"diffusion_constrained": True, "logprob_token_ids": LETTERS[:20]},
                names=("diffusion_constrained", "logprobs", "logprob_token_ids"),
            ),
        ],
        one("diffusion_frames", 1, _frames, streams=True),
        one("diffusion_step_map", True, _step_map),
        one("diffusion_trace", True, _trace, streams=False),
    ]
