"""Requests that hold every pair of fields, and what their answers must be.

A *single* has one field. What the server refuses of these it refuses beside anything. A *pair* of
the table of exclusions must be refused by the name that the table has. All other pairs stand in
*rows* of many fields, as few as ``allpairspy`` finds: each must be answered, and each field's law
must hold.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import httpx
from allpairspy import AllPairs

from tests.pairs.answers import Answer, ask
from tests.pairs.fields import CHAT, COMPLETIONS, Value, fields_of
from tests.support.engines.server import MODEL
from vllm_diffusion.requests.exclusions import EXCLUSIONS

PROMPTS = ("Add: 12 + 7", "Say: hello there", "Make a JSON record: name bob, age 27.")
# What vLLM's protocols exclude by themselves.
_OF_VLLM = {frozenset(("suffix", other)) for other in ("echo", "truncate_prompt_tokens")}


@dataclass
class Report:
    """What was sent to a server, and what was wrong.

    Attributes:
        refused_alone: Names of values that the server refuses by themselves, with their ways.
        num_sent: Requests that were sent.
        num_refused: Those of them that were refused.
        num_answered: Those that were answered.
        num_pairs: Pairs of values that were held to their laws together.
        faults: What was wrong, a line each.
    """

    refused_alone: set[tuple[str, str, str]] = field(default_factory=set)
    num_sent: int = 0
    num_refused: int = 0
    num_answered: int = 0
    num_pairs: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{self.num_sent} sent, {self.num_refused} refused, {self.num_answered} answered"
        return f"{counts}, {self.num_pairs} pairs of values held, {len(self.faults)} faults"


@dataclass(frozen=True)
class Served:
    """A server that pairs are sent to.

    Attributes:
        url: Its address.
        canvas: Positions of its canvases.
        ways: Values of ``diffusion_rule``; one without a name where there is no choice.
        is_masked: A position without a token holds a mask.
        is_aligned: Blocks are counted from position 0, so that the first holds the prompt's end.
        max_tokens: Of each answer.
        seconds: How long a request may take.
    """

    url: str
    canvas: int
    ways: Sequence[str] = ("",)
    is_masked: bool = False
    is_aligned: bool = False
    max_tokens: int = 20
    seconds: float = 300


class Pairs:
    """The requests of one server."""

    def __init__(self, served: Served, seed: int = 0) -> None:
        self._served = served
        self._fields = fields_of(served.canvas)
        spec: Any = SimpleNamespace(marks_undecided=served.is_masked)
        rows = [row for row in EXCLUSIONS if row.applies(spec)]
        self._excluded = {frozenset((row.field, row.other)) for row in rows} | _OF_VLLM
        # A server closes connections that are idle for as long as a client keeps them by default.
        limits = httpx.Limits(keepalive_expiry=1)
        self._client = httpx.Client(base_url=served.url, timeout=served.seconds, limits=limits)
        self._random = random.Random(seed)
        self.report = Report()

    def body(self, path: str, way: str, values: Iterable[Value], prompt: str) -> dict[str, Any]:
        """Return a request with some values, greedy unless one says otherwise."""
        body: dict[str, Any] = {"model": MODEL, "max_tokens": self._served.max_tokens}
        body |= {"temperature": 0, "seed": 7, "return_token_ids": True}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        sent = {name: value for one in values for name, value in one.body.items()}
        if "suffix" in sent:
            # It stands in the canvas of the answer.
            body["max_tokens"] = min(body["max_tokens"], self._served.canvas // 2)
        if {"diffusion_seed_canvas", "diffusion_canvas_length"} <= sent.keys():
            width = sent["diffusion_canvas_length"]
            sent["diffusion_seed_canvas"] = sent["diffusion_seed_canvas"][:width]
        if way:
            sent["diffusion_rule"] = way
        ours = {name: value for name, value in sent.items() if name.startswith("diffusion_")}
        body |= {name: value for name, value in sent.items() if name not in ours}
        if "logprob_token_ids" in sent and path == COMPLETIONS:
            body.setdefault("logprobs", 1)
        return body | ({"vllm_xargs": ours} if ours else {})

    def singles(self) -> None:
        """Send each value alone, whole and streamed, in each way and on each path that knows it.

        What is refused is noted, and must be refused with the same words in both forms.
        """
        for path, way in self._places():
            for value in self._values(path):
                answers = self._both_forms(path, way, [value])
                if any(answer.status == httpx.codes.BAD_REQUEST for answer in answers):
                    self.report.refused_alone.add((path, way, value.name))
                    self._check_refusal(path, way, [value], answers, value.fields)
                else:
                    self._check(path, way, [value], answers)

    def excluded(self) -> None:
        """Send each pair of the table of exclusions, which must be refused by name."""
        for path, way in self._places():
            for one, other in combinations(self._values(path), 2):
                is_excluded = self._excluding(one, other)
                if is_excluded and self._may_stand(path, way, (one, other)):
                    answers = self._both_forms(path, way, [one, other])
                    names = (*is_excluded, *one.fields, *other.fields)
                    self._check_refusal(path, way, [one, other], answers, names)

    def rows(self, most: int | None = None) -> None:
        """Send rows that hold every other pair.

        Args:
            most: How many rows of each way and path; ``None`` for all.
        """
        for path, way in self._places():
            rows = [*self._rows_of(path, way)]
            self._random.shuffle(rows)
            sent: list[tuple[list[Value], Answer]] = []
            for values in rows[:most]:
                answers = self._both_forms(path, way, values)
                self._check(path, way, values, answers)
                if answers and answers[0].status == httpx.codes.OK:
                    sent.append((values, answers[0]))
                    self.report.num_pairs += len(values) * (len(values) - 1) // 2
            self._in_a_batch(path, way, sent)

    # One request.

    def _places(self) -> Iterator[tuple[str, str]]:
        for path in (CHAT, COMPLETIONS):
            for way in self._served.ways:
                yield path, way

    def _values(self, path: str) -> list[Value]:
        return [value for each in self._fields for value in each.values if path in value.paths]

    def _excluding(self, one: Value, other: Value) -> Sequence[str]:
        if {one.name, other.name} == {"echo", "logprobs of text"} and self._served.is_masked:
            # Together they are log-probabilities of the prompt, which no position predicts.
            return "echo", "prompt_logprobs"
        for a in one.fields:
            for b in other.fields:
                if frozenset((a, b)) in self._excluded and a != b:
                    return a, b
        return ()

    def _may_stand(self, path: str, way: str, values: Sequence[Value]) -> bool:
        """Return true if no one of the values is refused alone, and some form takes all."""
        forms = {value.streams for value in values} - {None}
        alone = {(path, way, value.name) for value in values}
        return len(forms) < 2 and not alone & self.report.refused_alone

    def _both_forms(self, path: str, way: str, values: Sequence[Value]) -> list[Answer]:
        """Ask for an answer whole, and for the same one streamed, as far as there are both."""
        prompt = PROMPTS[len(values) % len(PROMPTS)]
        body, answers = self.body(path, way, values, prompt), []
        wanted = next((value.streams for value in values if value.streams is not None), None)
        for stream in (False, True):
            if wanted is None or wanted == stream:
                form = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
                answers.append(ask(self._client, path, body | form))
        for answer in answers:
            self.report.num_sent += 1
            self.report.num_answered += answer.status == httpx.codes.OK
            self.report.num_refused += answer.status == httpx.codes.BAD_REQUEST
        return answers

    # What must be.

    def _fault(self, path: str, way: str, values: Iterable[Value], what: str) -> None:
        names = " + ".join(value.name for value in values)
        self.report.faults.append(f"{path} {way} [{names}]: {what}")

    def _check_refusal(
        self,
        path: str,
        way: str,
        values: Sequence[Value],
        answers: Sequence[Answer],
        fields: Sequence[str],
    ) -> None:
        if len({repr(answer.told) for answer in answers}) > 1:
            self._fault(path, way, values, f"refused in two ways: {[a.told for a in answers]}")
        status, said = answers[0].status, answers[0]
        if status != httpx.codes.BAD_REQUEST:
            self._fault(path, way, values, f"is excluded, and answered with {status}")
        # vLLM's own may name the field in words alone.
        elif said.param not in {*fields, "diffusion_rule"} and not (
            said.param is None and any(name in said.message for name in (*fields, "tool_choice"))
        ):
            self._fault(path, way, values, f"names {said.param}: {said.message}")

    def _check(
        self, path: str, way: str, values: Sequence[Value], answers: Sequence[Answer]
    ) -> None:
        """Hold an answer in both forms to the law of each field."""
        if any(answer.status != httpx.codes.OK for answer in answers):
            said = next(answer for answer in answers if answer.status != httpx.codes.OK)
            what = f"status {said.status}, {said.param}: {said.message[:200]}"
            self._fault(path, way, values, what)
            return
        if len(answers) == 2 and answers[0].told != answers[1].told:
            told = [answer.told for answer in answers]
            self._fault(path, way, values, f"whole and streamed differ: {told[0]}, {told[1]}")
        sent: dict[str, Any] = {name: v for value in values for name, v in value.body.items()}
        sent |= {"max_tokens": self._served.max_tokens, "canvas": self._served.canvas}
        sent["given"] = lambda n: n % self._served.canvas if self._served.is_aligned else 0
        sent["prompt"] = PROMPTS[len(values) % len(PROMPTS)]
        for answer in answers:
            if len(answer.choices) != sent.get("n", 1):
                self._fault(path, way, values, f"{len(answer.choices)} choices")
            for value in values:
                for choice in answer.choices:
                    if problem := value.law(sent, choice, answer):
                        self._fault(path, way, values, f"{value.name}: {problem}")

    def _rows_of(self, path: str, way: str) -> Iterator[list[Value]]:
        parameters: list[list[Value | None]] = []
        for each in self._fields:
            fitting: list[Value | None] = [
                value
                for value in each.values
                if path in value.paths and self._may_stand(path, way, [value])
            ]
            if fitting:
                parameters.append([*fitting, None])

        def fits(row: list[Value | None]) -> bool:
            *before, last = row
            return last is None or all(
                one is None
                or (not self._excluding(one, last) and self._may_stand(path, way, [one, last]))
                for one in before
            )

        for row in AllPairs(parameters, filter_func=fits):
            yield [value for value in row if value is not None]

    def _in_a_batch(self, path: str, way: str, sent: Sequence[tuple[list[Value], Answer]]) -> None:
        """Ask once more, all at once and in another order: greedy answers are those asked alone."""
        greedy = [(values, answer) for values, answer in sent if not _is_drawn(values)]
        self._random.shuffle(greedy)

        def again(values: Sequence[Value]) -> Answer:
            return self._both_forms(path, way, values)[0]

        with ThreadPoolExecutor(8) as pool:
            for (values, alone), among in zip(
                greedy, pool.map(again, [values for values, _ in greedy]), strict=True
            ):
                if among.told != alone.told:
                    what = f"alone and among others differ: {alone.told}, {among.told}"
                    self._fault(path, way, values, what)


def _is_drawn(values: Iterable[Value]) -> bool:
    return any("temperature" in value.body for value in values)
