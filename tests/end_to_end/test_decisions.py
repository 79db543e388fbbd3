"""vLLM's decisions: questions read off one denoising step, as stock vLLM's own class answers them."""

from __future__ import annotations

import pytest

from tests.support.server import Server

pytestmark = pytest.mark.engine

QUESTIONS = [
    {"type": "predicate", "name": "blue", "instructions": "Is the sky blue?"},
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
        "levels": [{"label": "not"}, {"label": "rather"}, {"label": "very"}],
    },
]


@pytest.mark.parametrize("joint", [False, True], ids=["a canvas each", "one canvas"])
def test_decisions(joint: bool, server: Server) -> None:
    """Questions read from one denoising step get probabilities that sum to 1, again the same."""
    body = {"input": "The sky is blue.", "questions": QUESTIONS, "joint": joint}
    response = server.post("/v1/decisions", body)
    assert response.status_code == 200, response.text
    predicate, choice, score = response.json()["answers"]
    assert 0.0 <= predicate["probability"] <= 1.0
    assert choice["choice"] in ("blue", "red")
    for answer in (choice, score):
        assert sum(item["probability"] for item in answer["probabilities"]) == pytest.approx(1.0)
        assert 0.0 <= answer["confidence"] <= 1.0
    # The noise is drawn from the prompt, and nobody else's is in it.
    assert server.post("/v1/decisions", body).json()["answers"] == response.json()["answers"]


def passes(server: Server, text: str, num_questions: int, joint: bool) -> int:
    """How many a decision takes."""

    def count() -> int:
        server.wait_until_idle()
        return server.log.read_text(errors="replace").count("Iteration(")

    before = count()
    questions = (QUESTIONS * 2)[:num_questions]
    body = {"input": f"{text} {num_questions} {joint}", "questions": questions, "joint": joint}
    assert server.post("/v1/decisions", body).status_code == 200
    return count() - before


TEXTS = ("The grass is green.", "The sky, at night, is black and not blue. " * 4)


@pytest.mark.parametrize(
    ("num_questions", "joint", "most"),
    # An idle engine begins with the first of several requests, and takes the others together.
    [(1, False, 1), (1, True, 1), (6, True, 1), (6, False, 3)],
    ids=["one question", "one, joint", "six on one canvas", "six, a canvas each"],
)
def test_passes_of_a_decision(num_questions: int, joint: bool, most: int, server: Server) -> None:
    """Prompt and read together, whatever the number of questions on a canvas."""
    for text in TEXTS:
        assert 1 <= passes(server, text, num_questions, joint) <= most
