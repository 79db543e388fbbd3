"""Tests of ``suffix`` of ``/v1/completions`` over HTTP, as editors send it."""

import json
import sys
from typing import Any

import pytest

from tests.end_to_end.test_requests_page import blocks, run
from tests.pairs.answers import events
from tests.support.engines.server import MODEL, Server

pytestmark = pytest.mark.engine

ASKED: dict[str, Any] = {"model": MODEL, "prompt": "3, 4, ", "suffix": ", 6, 7", "max_tokens": 1}


def test_openai_client(server: Server) -> None:
    """The answers to several prompts are the middle alone, with its log-probabilities."""
    client = server.client()
    answer = client.completions.create(
        **ASKED | {"prompt": ["3, 4, ", "1, 2, 3, 4, "]}, n=2, temperature=0.01, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["5"] * 4
    assert [len(choice.logprobs.tokens) for choice in answer.choices if choice.logprobs] == [1] * 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/fim/completions"])
def test_all_that_follows_a_cursor(path: str, server: Server) -> None:
    """A file after the cursor is cut to its first tokens, for every prompt, answer and stream."""
    prompts = ["3, 4, ", "1, 2, 3, 4, "]
    body = ASKED | {"prompt": prompts, "n": 2, "temperature": 0.01, "seed": 1}
    near = ", 6, 7, 8, 9, 10, 11, 12, 13"
    answers = []
    for suffix in (near + ", 14" * 10**5, near + ", 14" * 20):
        whole = server.post(path, body | {"suffix": suffix}).json()
        details = whole["usage"]["completion_tokens_details"]
        assert details["suffix_tokens"] == 2 * 31
        streamed = body | {"suffix": suffix, "stream": True}
        streamed["stream_options"] = {"include_usage": True}
        chunks = events(server.post(path, streamed).text)
        texts = [""] * 4
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
        answers += [texts, [choice["text"] for choice in whole["choices"]]]
        assert chunks[-1]["usage"]["completion_tokens_details"]["suffix_tokens"] == 2 * 31
    assert answers == [["5"] * 4] * 4
    assert "completion_tokens_details" not in {
        name: value
        for name, value in server.post(path, ASKED | {"suffix": ""}).json()["usage"].items()
        if value is not None
    }


def test_the_page_runs(server: Server) -> None:
    """The command and the program of the page on editors print the middle of a text."""
    (command,) = blocks("sh", "editors.md")
    assert json.loads(run(["bash", "-c", command], server))["choices"][0]["text"] == "5"
    (program,) = blocks("python", "editors.md")
    assert run([sys.executable, "-c", program], server).strip() == "pmal"
