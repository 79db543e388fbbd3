"""Answers of a server, whole and streamed, in one form."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Choice:
    """One answer to a prompt.

    Attributes:
        text: What was written, without thoughts.
        thought: What was thought.
        ids: Token ids of both.
        finish: Why it ended.
        logprobs: Of each token that has one.
        steps: The step that decided each token, where that was asked for.
        trace: True if it says what steps began from.
        calls: Calls of tools, with names and arguments.
    """

    text: str = ""
    thought: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[float | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    trace: bool = False
    calls: list[dict[str, str]] = field(default_factory=list)

    def take(self, sent: Mapping[str, Any]) -> None:
        """Add what a choice of a body, or of an event, says."""
        message = sent.get("message") or sent.get("delta") or {}
        self.text += message.get("content") or sent.get("text") or ""
        self.thought += message.get("reasoning") or ""
        self.ids += sent.get("token_ids") or ()
        self.finish = sent.get("finish_reason") or self.finish
        self.trace |= bool(sent.get("diffusion_trace"))
        report = sent.get("logprobs") or {}
        self.logprobs += report.get("token_logprobs") or ()
        self.logprobs += [entry["logprob"] for entry in report.get("content") or ()]
        self.steps += sent.get("diffusion_step_map") or ()
        for i, call in enumerate(message.get("tool_calls") or ()):
            at, function = call.get("index", i), call.get("function") or {}
            while len(self.calls) <= at:
                self.calls.append({"name": "", "arguments": ""})
            for part in ("name", "arguments"):
                self.calls[at][part] += function.get(part) or ""


@dataclass
class Answer:
    """What a server says to a request.

    Attributes:
        status: Of HTTP.
        param: The field that a refusal names.
        message: What it says.
        choices: The answers.
        usage: Counts of tokens.
        num_frames: Events that show a canvas.
        num_prompt_logprobs: Positions of the prompt that have log-probabilities; ``None`` if none
            were sent.
        num_prompt_ids: Token ids of the prompt.
    """

    status: int
    param: str | None = None
    message: str = ""
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    num_frames: int = 0
    num_prompt_logprobs: int | None = None
    num_prompt_ids: int = 0

    @property
    def told(self) -> Any:
        """What must be the same whole and streamed, alone and among others."""
        if self.status != httpx.codes.OK:
            return self.status, self.param, self.message
        return [
            (one.text, one.thought, one.ids, one.finish, len(one.logprobs), one.steps, one.calls)
            for one in self.choices
        ]


def events(text: str) -> list[Any]:
    """Return the JSON of a stream's events, or nothing if ``text`` is not a stream."""
    lines = (line for line in text.splitlines() if line.startswith("data: {"))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def bodies_of(text: str) -> list[Any]:
    """Return the events of a stream, or the only body of another answer."""
    return events(text) or [json.loads(text)]


def choices_of(bodies: Iterable[Mapping[str, Any]]) -> list[Choice]:
    """Return the choices of a body, or of all events of a stream together."""
    choices: dict[int, Choice] = {}
    for body in bodies:
        for sent in body.get("choices") or ():
            choice = choices.setdefault(sent["index"], Choice())
            choice.take(sent)
            if body.get("type") == "diffusion_step_map":
                choice.steps += body["steps"]
    return [choices[index] for index in sorted(choices)]


def ask(client: httpx.Client, path: str, body: Mapping[str, Any]) -> Answer:
    """Post a request and read its answer, or the events of its stream."""
    response = client.post(path, json=body)
    answer = Answer(response.status_code)
    if response.status_code != httpx.codes.OK:
        _take_error(answer, response.json())
        return answer
    bodies = bodies_of(response.text)
    for each in bodies:
        if "error" in each:
            # Within a stream: too late for a status.
            answer.status = 0
            _take_error(answer, each)
            return answer
        for sent in each.get("choices") or ():
            answer.num_prompt_ids += len(sent.get("prompt_token_ids") or ())
            if sent.get("prompt_logprobs") is not None:
                answer.num_prompt_logprobs = len(sent["prompt_logprobs"])
        if each.get("prompt_logprobs") is not None:
            answer.num_prompt_logprobs = len(each["prompt_logprobs"])
        answer.usage = each.get("usage") or answer.usage
        answer.num_frames += each.get("type") == "diffusion_frame"
    answer.choices = choices_of(bodies)
    return answer


def _take_error(answer: Answer, body: Mapping[str, Any]) -> None:
    error = body.get("error") or body
    answer.param, answer.message = error.get("param"), str(error.get("message"))
