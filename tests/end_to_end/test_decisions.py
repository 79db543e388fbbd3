"""Tests of vLLM's decisions in both forms, read from one denoising step.

The answers are those of stock vLLM's own class.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.robustness.requests import picture
from tests.support.engines.server import Server, start_server
from tests.support.models.checkpoints import SHIPPED
from tests.support.oracles.oracle import Oracle

pytestmark = pytest.mark.engine

PAGE = Path(__file__).resolve().parents[2] / "docs/use/requests.md"

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
    """Probabilities of questions read from one step sum to 1, and repeat."""
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
    """Return how many passes a decision takes."""

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
    """Prompt and read share one pass, whatever the number of questions on a canvas."""
    for text in TEXTS:
        assert 1 <= passes(server, text, num_questions, joint) <= most


# As clients of transformers' own server send it: a state of text or JSON, and questions by id.
STATE = {"sky": "blue", "hour": 12}
SYSTEM_ONE: dict[str, Any] = {
    "blue": {"type": "noul", "instructions": "Is the sky blue?"},
    "night": {
        "type": "noul",
        "instructions": "Is it night?",
        "criteria": {"true": "after sunset", "false": None},
    },
    "colour": {
        "type": "choice",
        "instructions": "What colour is it?",
        "criteria": {"blue": None, "red": "as in roses"},
    },
    "certainty": {
        "type": "score",
        "instructions": "How sure are you?",
        "criteria": ["not", "rather", "very"],
    },
}


def letters(count: int) -> dict[str, Any]:
    """Return a question with so many options."""
    return {"type": "choice", "criteria": {f"option {i}": None for i in range(count)}}


@pytest.mark.parametrize("joint", [False, True], ids=["a canvas each", "one canvas"])
def test_system_one(joint: bool, server: Server) -> None:
    """A body of transformers' server gets probabilities for each question, by its id, and again."""
    body = {"state": STATE, "questions": SYSTEM_ONE, **({"joint": True} if joint else {})}
    response = server.post("/v1/systemone", body)
    assert response.status_code == 200, response.text
    whole = response.json()
    answers = whole["answers"]
    assert list(answers) == list(whole["diagnostics"]) == list(SYSTEM_ONE)
    for name, answer in answers.items():
        assert sum(answer["probabilities"].values()) == pytest.approx(1.0)
        assert 0.0 < whole["diagnostics"][name]["label_mass"] <= 1.0 + 1e-5
    canvases = whole["joint"]["canvases"] if joint else []
    together = [question for canvas in canvases for question in canvas["questions"]]
    assert together == (list(SYSTEM_ONE) if joint else [])
    assert server.post("/v1/systemone", body).json()["answers"] == answers


def test_bodies_of_the_page(server: Server) -> None:
    """Each body on the page about decisions is answered by the endpoint that is named before it."""
    section = (
        PAGE.read_text(encoding="utf-8").partition("\n### Decisions")[2].partition("\n### ")[0]
    )
    *parts, _ = re.split(r"^```json\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    found = list(zip(parts[::2], parts[1::2], strict=True))
    assert len(found) == 2
    for before, body in found:
        path = re.findall(r"`(/v1/\w+)`", before)[-1]
        response = server.post(path, json.loads(body))
        assert response.status_code == 200, response.text
        assert len(response.json()["answers"]) == len(json.loads(body)["questions"])


def test_both_forms_read_the_same(server: Server) -> None:
    """A choice in the same words has the same probabilities in both forms."""
    text, ask = "The sky is blue.", "What colour is it?"
    options = ("blue", "red")
    choices = [{"value": value} for value in options]
    question = {"type": "choice", "instructions": ask, "choices": choices}
    body = {"input": text, "questions": [question]}
    (openai,) = server.post("/v1/decisions", body).json()["answers"]
    # OpenAI's form spells a choice as JSON.
    criteria = {f'"{value}"': None for value in options}
    question = {"type": "choice", "instructions": ask, "criteria": criteria}
    body = {"state": text, "questions": {"colour": question}}
    answer = server.post("/v1/systemone", body).json()["answers"]["colour"]
    assert list(answer["probabilities"].values()) == [
        item["probability"] for item in openai["probabilities"]
    ]


class Reading:
    """transformers' model of a checkpoint, with the canvases that a server has for a question."""

    def __init__(self, checkpoint: Path, vocab_size: int) -> None:
        from transformers import AutoTokenizer
        from vllm.entrypoints.openai.decisions.strategies import DiffusionGemmaCanvasStrategy

        self._vllm: Any = DiffusionGemmaCanvasStrategy
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._oracle = Oracle(checkpoint)
        width = self._oracle.model.config.canvas_length = self._vllm.CANVAS_STEP
        (end,) = self._ids(self._vllm.END_OF_TURN)
        self._canvases = SimpleNamespace(
            vocab_size=vocab_size,
            end=end,
            pad=self._tokenizer.pad_token_id,
            width=width,
            _read_params=self._vllm._read_params,
        )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def labels(self, state: str, sent: dict[str, Any]) -> tuple[torch.Tensor, bool]:
        """Return the labels' probabilities, [num_options], and whether one is the likeliest
        token.
        """
        from vllm.entrypoints.openai.decisions.question_types import build_question

        criteria = sent.get("criteria")
        question = build_question("q", sent["type"], sent.get("instructions"), criteria, 26)
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{state}\n\n{question.type.prompt(question)}"}],
            add_generation_prompt=True,
            enable_thinking=False,
            return_dict=False,
        )
        labels = [self._ids(label)[0] for label in question.labels]
        read = self._vllm._sampling_params(self._canvases, labels, prompt)
        canvas = read.extra_args["diffusion_seed_canvas"]
        logits = self._oracle.first_step(prompt + self._ids(self._vllm.THOUGHT), canvas)[0]
        return logits.softmax(-1)[labels], int(logits.argmax()) in labels


def assert_reads(server: Server, state: str, sent: dict[str, Any], labels: torch.Tensor) -> bool:
    """Compare an answer with the model's probabilities; return ``argmax_is_label``."""
    whole = server.post("/v1/systemone", {"state": state, "questions": {"q": sent}}).json()
    found = list(whole["answers"]["q"]["probabilities"].values())
    assert found == pytest.approx((labels / labels.sum()).tolist(), rel=1e-3)
    said = whole["diagnostics"]["q"]
    assert said["label_mass"] == pytest.approx(float(labels.sum()), rel=1e-3)
    return bool(said["argmax_is_label"])


def test_the_models_own_distribution(server: Server) -> None:
    """Probabilities and ``label_mass`` are those of transformers' model on the same canvas."""
    model = Reading(SHIPPED, server.vocab_size)
    for sent in (*SYSTEM_ONE.values(), letters(26)):
        labels, is_label = model.labels("The sky is blue.", sent)
        assert assert_reads(server, "The sky is blue.", sent, labels) == is_label


@pytest.fixture(scope="module")
def seeing(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of random weights that accepts pictures."""
    log = tmp_path_factory.mktemp("seeing") / "server.log"
    options = ("--limit-mm-per-prompt", '{"image": 1, "video": 0, "audio": 0}')
    with start_server(checkpoint, log, *options) as running:
        yield running


@pytest.mark.slow
def test_argmax_is_label(seeing: Server, checkpoint: Path) -> None:
    """``argmax_is_label`` is true exactly where the model's likeliest token is a label."""
    model = Reading(checkpoint, seeing.vocab_size)
    seen = set()
    for i in range(100):
        labels, is_label = model.labels(f"state {i}", letters(26))
        if is_label not in seen:
            assert assert_reads(seeing, f"state {i}", letters(26), labels) == is_label
            seen.add(is_label)
        if len(seen) == 2:
            return
    raise AssertionError(f"the likeliest token was in all cases a label: {seen}")


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True], ids=["a canvas each", "one canvas"])
def test_images(joint: bool, seeing: Server) -> None:
    """Another picture gives other probabilities, and the same picture the same ones."""

    def answers(*shades: int) -> Any:
        body = {"state": "A picture.", "questions": SYSTEM_ONE, "joint": joint}
        images = [picture(96, 96, shade) for shade in shades]
        response = seeing.post("/v1/systemone", {**body, "images": images})
        return response.json()["answers"] if response.status_code == 200 else response.text

    bright = answers(200)
    assert list(bright) == list(SYSTEM_ONE), bright
    # The first computes what the others find in the cache, in a pass that rounds otherwise.
    assert answers(200) == answers(200) != answers(10)
    assert "image" in answers(200, 10)


@pytest.mark.parametrize(("name", "said"), [("word", "question 3 (word)"), (None, "question 3")])
def test_more_options_than_letters(name: str | None, said: str, server: Server) -> None:
    """A question with more options than there are letters is a 400 with both numbers."""
    many = {
        "type": "choice",
        "instructions": "?",
        "choices": [{"value": str(i)} for i in range(27)],
    }
    many |= {} if name is None else {"name": name}
    response = server.post("/v1/decisions", {"input": "7+8", "questions": [*QUESTIONS, many]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "questions"
    assert f"up to 26 options each; {said} has 27" in error["message"]
