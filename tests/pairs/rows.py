"""Requests that hold every pair of fields, and what their answers must be.

A *single* has one field. What the server refuses of these it refuses beside anything. A *pair* of
the table of exclusions must be refused by the name that the table has. All other pairs stand in
*rows* of many fields, as few as ``allpairspy`` finds: each must be answered, and each field's law
must hold.
"""

import random
from collections.abc import Iterator, Sequence
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
MAX_TOKENS = 20
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
    """

    url: str
    canvas: int
    ways: Sequence[str] = ("",)
    is_masked: bool = False
    is_aligned: bool = False


@dataclass(frozen=True)
class Row:
    """Values of fields that are sent together.

    Attributes:
        path: Where they are sent.
        way: Value of ``diffusion_rule``; empty where there is no choice.
        values: The values.
    """

    path: str
    way: str
    values: Sequence[Value]

    def __str__(self) -> str:
        return f"{self.path} {self.way} [{' + '.join(value.name for value in self.values)}]"

    @property
    def prompt(self) -> str:
        """The prompt that they are sent with."""
        return PROMPTS[len(self.values) % len(PROMPTS)]

    @property
    def sent(self) -> dict[str, Any]:
        """The fields of all values."""
        return {name: value for one in self.values for name, value in one.body.items()}


class Pairs:
    """The requests of one server."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._fields = fields_of(served.canvas)
        spec: Any = SimpleNamespace(marks_undecided=served.is_masked)
        rows = [row for row in EXCLUSIONS if row.applies(spec)]
        self._excluded = {frozenset((row.field, row.other)) for row in rows} | _OF_VLLM
        # A server closes connections that are idle for as long as a client keeps them by default.
        limits = httpx.Limits(keepalive_expiry=1)
        self._client = httpx.Client(base_url=served.url, timeout=300, limits=limits)
        self._random = random.Random(0)
        self.report = Report()

    def body(self, row: Row) -> dict[str, Any]:
        """Return a request with some values, greedy unless one says otherwise."""
        body: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS}
        body |= {"temperature": 0, "seed": 7, "return_token_ids": True}
        if row.path == CHAT:
            body["messages"] = [{"role": "user", "content": row.prompt}]
        else:
            body["prompt"] = row.prompt
        sent = row.sent
        if "suffix" in sent:
            # It stands in the canvas of the answer.
            body["max_tokens"] = min(body["max_tokens"], self._served.canvas // 2)
        if {"diffusion_seed_canvas", "diffusion_canvas_length"} <= sent.keys():
            width = sent["diffusion_canvas_length"]
            sent["diffusion_seed_canvas"] = sent["diffusion_seed_canvas"][:width]
        if row.way:
            sent["diffusion_rule"] = row.way
        ours = {name: value for name, value in sent.items() if name.startswith("diffusion_")}
        body |= {name: value for name, value in sent.items() if name not in ours}
        if "logprob_token_ids" in sent and row.path == COMPLETIONS:
            body.setdefault("logprobs", 1)
        return body | ({"vllm_xargs": ours} if ours else {})

    def singles(self) -> None:
        """Send each value alone, whole and streamed, in each way and on each path that knows it.

        What is refused is noted, and must be refused with the same words in both forms.
        """
        for path, way in self._places():
            for value in self._values(path):
                row = Row(path, way, [value])
                answers = self._both_forms(row)
                if any(answer.status == httpx.codes.BAD_REQUEST for answer in answers):
                    self.report.refused_alone.add((path, way, value.name))
                    self._check_refusal(row, answers)
                else:
                    self._check(row, answers)

    def excluded(self) -> None:
        """Send each pair of the table of exclusions, which must be refused by name."""
        for path, way in self._places():
            for one, other in combinations(self._values(path), 2):
                row = Row(path, way, [one, other])
                is_excluded = self._excluding(one, other)
                if is_excluded and self._may_stand(row):
                    self._check_refusal(row, self._both_forms(row), is_excluded)

    def rows(self, most: int | None = None) -> None:
        """Send rows that hold every other pair.

        Args:
            most: How many rows of each way and path; ``None`` for all.
        """
        for path, way in self._places():
            rows = [*self._rows_of(path, way)]
            self._random.shuffle(rows)
            sent: list[tuple[Row, Answer]] = []
            for row in rows[:most]:
                answers = self._both_forms(row)
                self._check(row, answers)
                if answers and answers[0].status == httpx.codes.OK:
                    sent.append((row, answers[0]))
                    self.report.num_pairs += len(row.values) * (len(row.values) - 1) // 2
            self._in_a_batch(sent)

    # One request.

    def _places(self) -> Iterator[tuple[str, str]]:
        for path in (CHAT, COMPLETIONS):
            for way in self._served.ways:
                yield path, way

    def _values(self, path: str) -> list[Value]:
        return [value for values in self._fields for value in values if path in value.paths]

    def _excluding(self, one: Value, other: Value) -> Sequence[str]:
        if {one.name, other.name} == {"echo", "logprobs of text"} and self._served.is_masked:
            # Together they are log-probabilities of the prompt, which no position predicts.
            return "echo", "prompt_logprobs"
        for a in one.fields:
            for b in other.fields:
                if frozenset((a, b)) in self._excluded and a != b:
                    return a, b
        return ()

    def _may_stand(self, row: Row) -> bool:
        """Return true if no one of the values is refused alone, and some form takes all."""
        forms = {value.streams for value in row.values} - {None}
        alone = {(row.path, row.way, value.name) for value in row.values}
        return len(forms) < 2 and not alone & self.report.refused_alone

    def _both_forms(self, row: Row) -> list[Answer]:
        """Ask for an answer whole, and for the same one streamed, as far as there are both."""
        body, answers = self.body(row), []
        wanted = next((value.streams for value in row.values if value.streams is not None), None)
        for stream in (False, True):
            if wanted is None or wanted == stream:
                form = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
                answers.append(ask(self._client, row.path, body | form))
        for answer in answers:
            self.report.num_sent += 1
            self.report.num_answered += answer.status == httpx.codes.OK
            self.report.num_refused += answer.status == httpx.codes.BAD_REQUEST
        return answers

    # What must be.

    def _fault(self, row: Row, what: str) -> None:
        self.report.faults.append(f"{row}: {what}")

    def _check_refusal(
        self, row: Row, answers: Sequence[Answer], excluded: Sequence[str] = ()
    ) -> None:
        fields = [*excluded, *(name for value in row.values for name in value.fields)]
        if len({repr(answer.told) for answer in answers}) > 1:
            self._fault(row, f"refused in two ways: {[a.told for a in answers]}")
        status, said = answers[0].status, answers[0]
        if status != httpx.codes.BAD_REQUEST:
            self._fault(row, f"is excluded, and answered with {status}")
        # vLLM's own may name the field in words alone.
        elif said.param not in {*fields, "diffusion_rule"} and not (
            said.param is None and any(name in said.message for name in (*fields, "tool_choice"))
        ):
            self._fault(row, f"names {said.param}: {said.message}")

    def _check(self, row: Row, answers: Sequence[Answer]) -> None:
        """Hold an answer in both forms to the law of each field."""
        if any(answer.status != httpx.codes.OK for answer in answers):
            said = next(answer for answer in answers if answer.status != httpx.codes.OK)
            what = f"status {said.status}, {said.param}: {said.message[:200]}"
            self._fault(row, what)
            return
        if len(answers) == 2 and answers[0].told != answers[1].told:
            told = [answer.told for answer in answers]
            self._fault(row, f"whole and streamed differ: {told[0]}, {told[1]}")
        sent = row.sent | {"canvas": self._served.canvas}
        sent["given"] = lambda n: n % self._served.canvas if self._served.is_aligned else 0
        for answer in answers:
            if len(answer.choices) != sent.get("n", 1):
                self._fault(row, f"{len(answer.choices)} choices")
            for value in row.values:
                for choice in answer.choices:
                    if problem := value.law(sent, choice, answer):
                        self._fault(row, f"{value.name}: {problem}")

    def _rows_of(self, path: str, way: str) -> Iterator[Row]:
        parameters: list[list[Value | None]] = []
        for values in self._fields:
            fitting: list[Value | None] = [
                value
                for value in values
                if path in value.paths and self._may_stand(Row(path, way, [value]))
            ]
            if fitting:
                parameters.append([*fitting, None])

        def fits(row: list[Value | None]) -> bool:
            *before, last = row
            return last is None or all(
                one is None
                or (not self._excluding(one, last) and self._may_stand(Row(path, way, [one, last])))
                for one in before
            )

        for row in AllPairs(parameters, filter_func=fits):
            yield Row(path, way, [value for value in row if value is not None])

    def _in_a_batch(self, sent: Sequence[tuple[Row, Answer]]) -> None:
        """Ask once more, all at once and in another order: greedy answers are those asked alone."""
        greedy = [(row, answer) for row, answer in sent if "temperature" not in row.sent]
        self._random.shuffle(greedy)
        with ThreadPoolExecutor(8) as pool:
            again = pool.map(self._both_forms, [row for row, _ in greedy])
            for (row, alone), (among, *_) in zip(greedy, again, strict=True):
                if among.told != alone.told:
                    what = f"alone and among others differ: {alone.told}, {among.told}"
                    self._fault(row, what)
