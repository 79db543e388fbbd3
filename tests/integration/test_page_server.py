"""Tests of the page of the live canvas with a real server that ``serve-page`` started."""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.support.doubles.page_browser import MARKS, ask, cells, connect, counter
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.cli.server import Server

# A server of its own, before which the page does what it does before a stub (``test_page.py``).
pytestmark = [*MARKS, pytest.mark.slow]
SERVE = (
    *("--port", "{port}", "--served-model-name", "tiny", "--enforce-eager"),
    *("--max-model-len", "512", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "67108864"),
    *("--limit-mm-per-prompt", '{"image": 1, "video": 0, "audio": 0}'),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, "-m", "vllm_diffusion.cli.main", "serve-page", str(SHIPPED), *SERVE]
    with pytest.MonkeyPatch.context() as patch:
        # What only the tests' own process needs.
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET", "VLLM_LOGGING_LEVEL"):
            patch.delenv(name, raising=False)
        with Server(command, report=print, timeout=600) as running:
            yield running


def chunks_of(server: Server, prompt: str) -> list[dict[str, Any]]:
    """Return the stream of the same question, sent without the page."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "seed": 0,
        "max_tokens": 256,
        "stream": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {
            "diffusion_frames": 1,
            "diffusion_frame_fields": ["tokens"],
            "diffusion_step_map": 1,
        },
    }
    headers = {"Authorization": f"Bearer {server.api_key}"}
    address = f"{server.url}/v1/chat/completions"
    text = httpx.post(address, json=body, headers=headers, timeout=300).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_watch_and_replay(server: Server, new_page: Callable[..., Page]) -> None:
    """The page shows every step of an answer as the server streams it, and again from its link."""
    page = new_page(f"{server.url}/diffusion/")
    connect(page, server.api_key)
    prompt = "Reverse these words: cat, dog, tree."
    ask(page, prompt)

    chunks = chunks_of(server, prompt)
    frames = [chunk for chunk in chunks if chunk.get("type") == "diffusion_frame"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    answer = "".join(delta.get("content") or "" for delta in deltas)
    assert answer.strip()
    expect(page.get_by_role("log").locator(".said").last).to_have_text(answer)
    scrubber = page.get_by_role("slider", name="Step")
    assert scrubber.get_attribute("max") == str(len(frames) - 1)
    scrubber.focus()
    page.keyboard.press("Home")
    for index, frame in enumerate(frames):
        shown = [cell.replace("␣", " ").replace("↵", "\n") for cell in cells(page)]
        assert shown == frame["tokens"]
        ends = [at for at, token in enumerate(frame["tokens"]) if token in ("<turn|>", "<eos>")]
        num_shown = ends[0] + 1 if ends else len(shown)
        positions = page.get_by_role("listbox", name="Canvas").get_by_role("option")
        expect(positions).to_have_count(num_shown)
        expect(scrubber).to_have_value(str(index))
        expect(page.locator("output")).to_contain_text(
            f"canvas {frame['block'] + 1} of {frames[-1]['block'] + 1}, "
            f"step {frame['step']} of at most {frame['total']}"
        )
        page.keyboard.press("ArrowRight")
    expect(page.locator(".text .emitted")).to_have_text(answer)
    expect(page.locator(".text .draft")).to_be_empty()
    steps = [step for chunk in chunks for step in chunk.get("steps", ())]
    small = page.locator(".map .cell > small").all_inner_texts()
    assert [int(text) for text in small] == steps
    panel = page.locator(".panel")
    assert counter(panel, "Denoising steps") == len(frames)
    assert counter(panel, "Tokens") == chunks[-1]["usage"]["completion_tokens"] == len(steps)
    page.get_by_role("button", name="Replay").click()
    expect(page.locator("output")).to_contain_text("step 1 of")
    expect(page.get_by_role("button", name="Replay")).to_be_visible()
    expect(scrubber).to_have_value(str(len(frames) - 1))

    link = page.get_by_label("Link to this prompt").input_value()
    assert server.api_key not in link
    known = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
    assert server.api_key not in page.evaluate(known) + page.content()
    theirs = new_page(link)
    connect(theirs, server.api_key)
    expect(theirs.get_by_role("textbox", name="Message")).to_have_value(prompt)
    theirs.get_by_role("button", name="Send").click()
    expect(theirs.locator(".state")).to_have_text("Done")
    expect(theirs.get_by_role("log").locator(".said").last).to_have_text(answer)
    assert cells(theirs, ".map") == cells(page, ".map")
