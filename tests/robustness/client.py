"""One request as a client sends it, and what became of it."""

import json
import re
import time
from dataclasses import dataclass
from typing import Any

import httpx

from tests.pairs.answers import bodies_of, choices_of, events
from tests.robustness.requests import CHAT, COMPLETIONS, Request


@dataclass(frozen=True)
class VllmsOwn:
    """A 5xx that vLLM answers with any model.

    Attributes:
        body: What the request's JSON holds, a regular expression.
        message: What its answer says, the same.
        reason: Why.
        heals: Whether the same request is answered when it is sent again, which is then checked.
    """

    body: str
    message: str
    reason: str
    heals: bool = False


VLLMS_OWN = (
    VllmsOwn(
        r'"url": "data:,"',
        "Only base64 data URLs are supported",
        "a data URL that is not base64: 501",
    ),
    VllmsOwn(
        '"(kv|ec)_transfer_params": [^n]',
        "",
        "a transfer's parameters are believed, and fail where they are used",
    ),
    VllmsOwn(
        r"\\ud800",
        '"message": ?""',
        "text that is not Unicode cannot be sent to the engine's process",
    ),
    VllmsOwn(
        '"truncate_prompt_tokens"',
        "Failed to apply prompt replacement",
        "a prompt whose image was truncated away",
    ),
    VllmsOwn(
        '"image_url"',
        "Internal server error",
        "a request refused after its image was prepared leaves the image marked as sent, and the "
        "next one with it fails",
        heals=True,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What became of one request.

    Attributes:
        status: Of the answer, or of the error event that ended its stream; ``None`` without one.
        text: The answer's body, or its events.
        ending: ``"answer"``; ``"left"`` by the client, or ``"late"`` and given up on; ``"broken"``
            where the connection ended first; ``"unsent"`` to a server that is gone.
    """

    status: int | None
    text: str
    ending: str

    @property
    def sort(self) -> str:
        """Return a column of the campaign's table; ``failed`` for what must not happen."""
        if self.ending == "left":
            return "aborted"
        if self.ending != "answer" or self.status is None:
            return "failed"
        if self.status < 400:
            return "answered"
        return "refused" if self.status < 500 else "failed"

    def vllms_own(self, request: Request) -> VllmsOwn | None:
        """Return why a 5xx is vLLM's and not ours, or ``None``."""
        if self.ending != "answer" or self.sort != "failed":
            return None
        body = request.body if isinstance(request.body, str) else json.dumps(request.body)
        for own in VLLMS_OWN:
            if re.search(own.body, body) and re.search(own.message, self.text):
                return own
        return None


def send(client: httpx.Client, request: Request, seconds: float) -> Outcome:
    """Post a request and read its answer, up to ``seconds`` or the client's own patience."""
    patience = request.leaves_after
    begun = time.monotonic()
    deadline = begun + (seconds if patience is None else patience)
    # As Python writes it: NaN is not JSON, but it may be sent, and servers read it.
    content = request.body if isinstance(request.body, str) else json.dumps(request.body)
    status, text = None, ""
    try:
        with client.stream(
            "POST",
            request.path,
            content=content.encode("utf-8", "replace"),
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(max(deadline - begun, 0.01)),
        ) as response:
            status = response.status_code
            pieces = []
            for piece in response.iter_text():
                pieces.append(piece)
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("past the deadline")
            text = "".join(pieces)
        ending = "answer"
    except httpx.TimeoutException:
        ending = "late" if patience is None else "left"
    except httpx.TransportError as error:
        ending, text = "broken", repr(error)
    if ending == "answer" and status == 200 and (error_code := _error_event(text)):
        status = error_code
    return Outcome(status, text, ending)


def _error_event(text: str) -> int | None:
    """Return the code of an error in a stream that had begun with 200."""
    if "error" not in text or not text.lstrip().startswith(("data:", "event:")):
        return None
    for event in events(text):
        # Of a stream of responses.
        if event.get("type") == "error" and event.get("code") == "BadRequestError":
            return 400
        error = event.get("error") or event.get("response", {}).get("error")
        if error:
            code = error.get("code") if isinstance(error, dict) else None
            return code if isinstance(code, int) else 500
    return None


def answers(request: Request, outcome: Outcome) -> list[Any]:
    """Return each choice's text and finish reason, without rounded numbers and random names."""
    assert request.path in (COMPLETIONS, CHAT)
    choices = choices_of(bodies_of(outcome.text))
    return [(one.text, one.thought, one.calls, one.finish) for one in choices]
