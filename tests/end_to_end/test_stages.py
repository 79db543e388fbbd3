"""Pipeline stages: one process's tokens, in both orders; nobody who fails or leaves harms another."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.end_to_end.test_decisions import numbers
from tests.end_to_end.test_scaling import shown_stream
from tests.support.checkpoints import SHIPPED, random_checkpoint
from tests.support.seeded_requests import (
    ALL,
    answers_alone,
    answers_of_one_process,
    answers_together,
    check_answers,
)
from tests.support.server import Server, start_server
from vllm_diffusion.cli.checkpoint import shipped_checkpoint

pytestmark = pytest.mark.engine

TWO_STAGES = ("--pipeline-parallel-size", "2")
# Several canvases, a filter, a penalty, log-probabilities, n, a constraint, a chat.
SOME = (1, 3, 6, 8, 9, 10, 11)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two stages, in the order that a CPU chooses."""
    log = tmp_path_factory.mktemp("stages") / "server.log"
    with start_server(SHIPPED, log, *TWO_STAGES) as running:
        yield running


def test_tokens(staged: Server, server: Server) -> None:
    """Alone, and in batches that are at different stages at once."""
    expected = answers_alone(server, SOME)
    assert answers_alone(staged, SOME) == expected
    assert answers_together(staged, SOME) == expected
    staged.wait_until_idle()


def test_log_probabilities(staged: Server, server: Server) -> None:
    """Of the prompt and of the answer: they are made where the vocabulary is."""
    body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "seed": 5}
    body |= {"logprobs": 2, "prompt_logprobs": 1}
    choices = [one.post("/v1/completions", body).json()["choices"][0] for one in (staged, server)]
    assert choices[0]["logprobs"]["tokens"] == choices[1]["logprobs"]["tokens"]
    for key in ("logprobs", "prompt_logprobs"):
        mine, theirs = (numbers(choice[key]) for choice in choices)
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert len(choices[0]["prompt_logprobs"]) > 4


def test_frames(staged: Server) -> None:
    """What is shown of a canvas comes from the last stage; the last frame is what is committed."""
    chunks = list(shown_stream(staged, 7))
    frames = [chunk for chunk in chunks if chunk.get("type") == "diffusion_frame"]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert "".join(frame["text"] for frame in frames if frame["is_last"]) == text


def test_whoever_leaves_or_fails(staged: Server) -> None:
    """Clients go while their canvases are between stages, others are refused: the next get theirs."""
    for num_chunks in (1, 3, 8):
        stream = shown_stream(staged, 7, 900)
        for _ in range(num_chunks):
            next(stream)
        stream.close()
    body = {"prompt": "Red", "vllm_xargs": {"diffusion_entropy_bound": -1}}
    response = staged.post("/v1/completions", body)
    assert response.status_code == 400
    assert "diffusion_entropy_bound" in response.text
    staged.wait_until_idle()
    staged.assert_alive()
    assert "Traceback" not in staged.log.read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "options",
    [
        "--pipeline-parallel-size 2",
        "--pipeline-parallel-size 2 --async-scheduling",
        "--pipeline-parallel-size 3 --async-scheduling",
        "--pipeline-parallel-size 2 --tensor-parallel-size 2",
        "--pipeline-parallel-size 2 --tensor-parallel-size 2 --async-scheduling",
    ],
)
def test_tokens_of_layouts(options: str, server: Server, tmp_path: Path) -> None:
    """All requests, alone and together."""
    check_answers(SHIPPED, tmp_path, options.split(), answers_alone(server), ALL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("order", ["--no-async-scheduling", "--async-scheduling"])
def test_tokens_of_a_masked_model(order: str, tmp_path: Path) -> None:
    """Blocks counted from the start, whose head may be the prompt's end."""
    sdar = shipped_checkpoint("sdar")
    expected = answers_of_one_process(sdar, tmp_path / "one.log")
    check_answers(sdar, tmp_path, [*TWO_STAGES, order], expected, ALL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tokens_of_images(tmp_path: Path) -> None:
    """The first stage embeds them; that their rows attend in both directions all stages know."""
    checkpoint = random_checkpoint(tmp_path / "checkpoint")
    limits = ("--limit-mm-per-prompt", '{"image": 1, "video": 0, "audio": 0}')
    answers = []
    for name, options in (("one", ()), ("two", TWO_STAGES)):
        with start_server(checkpoint, tmp_path / f"{name}.log", *limits, *options) as running:
            answers.append([_described(running, seed) for seed in (1, 2)])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def _described(server: Server, seed: int) -> list[int]:
    """The tokens that a server says of a random picture."""
    pixels = torch.randint(0, 256, (96, 96, 3), generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 40, "seed": 3}
    body |= {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]
