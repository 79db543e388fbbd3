"""Seeded requests over HTTP with different parameters, and the tokens of their answers."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.support.engines.server import Server, start_server

_STEPS = {"vllm_xargs": {"diffusion_max_steps": 6}}
_MESSAGES = [{"role": "user", "content": "What is 7+8?"}]
_SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}

# A path of the server, and a body without its seed.
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("completions", {"prompt": "Once upon a time", "max_tokens": 20}),
    ("completions", {"prompt": "Once upon a time", "max_tokens": 75}),
    ("completions", {"prompt": "red green blue " * 9, "max_tokens": 40, "temperature": 0.0}),
    ("completions", {"prompt": "One, two", "max_tokens": 20, "top_p": 0.8}),
    ("completions", {"prompt": "One, two", "max_tokens": 20, "top_k": 20, "temperature": 0.7}),
    ("completions", {"prompt": "One, two", "max_tokens": 20, "min_p": 0.05}),
    ("completions", {"prompt": "A list:", "max_tokens": 40, "presence_penalty": 1.0}),
    ("completions", {"prompt": "A list:", "max_tokens": 20, "logit_bias": {"70": 5.0}}),
    ("completions", {"prompt": "A list:", "max_tokens": 20, "logprobs": 3}),
    ("completions", {"prompt": "Tree", "max_tokens": 20, "n": 2}),
    (
        "completions",
        {"prompt": "x", "max_tokens": 30, "structured_outputs": {"regex": "[a-c]{3,5}"}},
    ),
    ("chat/completions", {"messages": _MESSAGES, "max_tokens": 40}),
    ("chat/completions", {"messages": _MESSAGES, "max_tokens": 20, "n": 2, "logprobs": True}),
    ("chat/completions", {"messages": _MESSAGES, "max_tokens": 70, "top_p": 0.9, "min_p": 0.01}),
    (
        "chat/completions",
        {
            "messages": _MESSAGES,
            "max_tokens": 40,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "sum", "schema": _SCHEMA, "strict": True},
            },
        },
    ),
)
ALL = range(len(REQUESTS))
# Those whose end is the grammar's.
_ENDS = ("structured_outputs", "response_format")

# Of every choice of an answer: its token ids.
Tokens = list[list[int]]


def seeded_request(index: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of one of :data:`REQUESTS`, without the model's name."""
    path, request = REQUESTS[index]
    # Some checkpoints are greedy unless a request sets a temperature.
    body = {"temperature": 1.0, **_STEPS, **request, "seed": index, "return_token_ids": True}
    body["ignore_eos"] = not any(name in request for name in _ENDS)
    return f"/v1/{path}", body


def tokens_of(response: httpx.Response) -> Tokens:
    """Return the tokens of an answer to one of them."""
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def answer(server: Server, index: int) -> Tokens:
    """Return the tokens that a server gives one of :data:`REQUESTS`."""
    return tokens_of(server.post(*seeded_request(index)))


def answers_alone(server: Server, chosen: Sequence[int] = ALL) -> list[Tokens]:
    """Send all or some of the requests, one after another."""
    return [answer(server, index) for index in chosen]


def answers_together(server: Server, chosen: Sequence[int] = ALL) -> list[Tokens]:
    """Send all or some of the requests at once."""
    with ThreadPoolExecutor(len(chosen)) as pool:
        return list(pool.map(lambda index: answer(server, index), chosen))


def check_tokens(server: Server, expected: list[Tokens], chosen: Sequence[int] = ALL) -> None:
    """Check that a server gives the expected tokens, alone and at once."""
    assert answers_alone(server, chosen) == expected
    assert answers_together(server, chosen) == expected
    server.wait_until_idle()


def check_answers(
    checkpoint: Path,
    folder: Path,
    options: Sequence[str],
    expected: list[Tokens],
    chosen: Sequence[int] = ALL,
) -> None:
    """Check that a server with these options gives the expected tokens, alone and at once.

    Its log, in ``folder``, is left without a trace.
    """
    with start_server(checkpoint, folder / "server.log", *options) as server:
        check_tokens(server, expected, chosen)
        server.assert_alive()
        assert "Traceback" not in server.log.read_text(errors="replace")
