"""Tests of pages over HTTP: MinerU-Diffusion in ``vllm serve``, with vision models' clients."""

import base64
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.robustness.requests import picture as data_url
from tests.support.engines.commands import run
from tests.support.engines.server import MODEL, Server, start_server
from tests.support.families.mineru import generate
from tests.support.families.mineru_model import IMAGE_ID, mineru, num_tokens
from tests.support.families.model import MASK_ID
from tests.support.families.run import suppress

pytestmark = pytest.mark.engine

MAX_MODEL_LEN, NUM_PICTURES, MAX_TOKENS = 256, 3, 40
# Of the largest 120 tokens.
LARGE = data_url(400, 300)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="one-rank"),
        pytest.param(("--tensor-parallel-size", "2"), id="two-ranks", marks=pytest.mark.slow),
    ],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("documents")
    options = ("--max-model-len", str(MAX_MODEL_LEN), *request.param)
    pictures = ("--limit-mm-per-prompt", f'{{"image": {NUM_PICTURES}}}')
    checkpoint = mineru().save(folder / "mineru")
    with start_server(checkpoint, folder / "server.log", *options, *pictures) as started:
        yield started


def ask(server: Server, urls: list[str], **fields: Any) -> httpx.Response:
    """Send a question about pictures."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": "Text Recognition:"})
    body = {"messages": [{"role": "user", "content": parts}], "model": MODEL, "temperature": 0}
    return server.post("/v1/chat/completions", body | {"max_tokens": MAX_TOKENS} | fields)


def test_pages(server: Server) -> None:
    """A chat with pictures is answered with the tokens of the reference loop."""
    from PIL import Image

    urls = [data_url(80, 56, 30), data_url(40, 24, 200)]
    pictures = [
        Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
        for url in urls
    ]
    answer = ask(server, urls, ignore_eos=True, return_token_ids=True).json()
    prompt, tokens = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert prompt.count(IMAGE_ID) == sum(map(num_tokens, pictures))
    found = generate(
        suppress(mineru().seeing(pictures), [MASK_ID]),
        prompt,
        mask_id=MASK_ID,
        gen_length=MAX_TOKENS,
        temperature=0,
    )
    assert tokens == found.tokens


def test_example(server: Server, tmp_path: Path) -> None:
    """``examples/documents.py`` prints what the model reads on a drawn page and on a file."""
    from PIL import Image

    Image.new("RGBA", (300, 200), "white").save(tmp_path / "page.png")
    command = [sys.executable, Path(__file__).parents[2] / "examples/documents.py"]
    command += ["--url", f"{server.url}/v1", "--model", MODEL]
    environment = {**os.environ, "OPENAI_API_KEY": "none"}
    drawn, blank = (
        run(*command, *files, timeout=120, env=environment).stdout
        for files in ([], [tmp_path / "page.png"])
    )
    # Random weights say something else of each picture.
    assert len({drawn.strip(), blank.strip(), ""}) == 3


@pytest.mark.parametrize(
    ("urls", "field", "says"),
    [
        ([data_url()] * (NUM_PICTURES + 1), "image", "At most 3 image(s)"),
        ([LARGE] * NUM_PICTURES, None, "maximum context length (256)"),
        # Of Pillow's limit.
        ([data_url(20000, 20000)], "image_url", "is too large"),
        ([data_url(8000, 16)], "image_url", "8000 x 16 pixels ... 200 times"),
    ],
    ids=["too many", "too many tokens", "too large", "too long"],
)
def test_refused_pages(server: Server, urls: list[str], field: str | None, says: str) -> None:
    """Wrong pictures get a 400 with the reason, and with the field if one alone is wrong."""
    response = ask(server, urls)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    for part in says.split(" ... "):
        assert part in error["message"]
    assert "Traceback" not in server.log.read_text(errors="replace")
