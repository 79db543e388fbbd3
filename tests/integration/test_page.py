"""The page of the live canvas in a real browser: Debian's Chromium, without a head.

Before a real server that ``vllm-diffusion serve-page`` started, and before a stub of it for what no
healthy server does.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from tests.support import page_stub
from tests.support.checkpoints import SHIPPED
from tests.support.page_stub import Stub, running_stub
from vllm_diffusion.cli.server import Server

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium"),
]
# Longer than anything here takes on two busy cores.
MILLISECONDS = 60_000
SERVE = (
    *(str(SHIPPED), "--port", "{port}", "--served-model-name", "tiny", "--enforce-eager"),
    *("--max-model-len", "512", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "67108864"),
    *("--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}'),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=MILLISECONDS)
    with sync_playwright() as playwright:
        # As root Chromium has no sandbox of its own.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address as somebody else would: with nothing of what another page knows."""
    contexts: list[BrowserContext] = []
    heard: list[str] = []

    def open_page(url: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(MILLISECONDS)
        page = context.new_page()
        origin = re.match(r"http://[^/]+/", url)[0]  # type: ignore[index]
        page.on("request", lambda request: heard.append(request.url))
        page.on("pageerror", lambda error: heard.append(f"error: {error}"))
        page.on("console", lambda said: heard.append(f"{origin}: {said.text}"))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    elsewhere = [url for url in heard if not url.startswith(("http://127.0.0.1:", "data:"))]
    assert elsewhere == []
    assert not [said for said in heard if "Content Security Policy" in said]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, "-m", "vllm_diffusion.cli.main", "serve-page", *SERVE]
    with pytest.MonkeyPatch.context() as patch:
        # What only the tests' own process needs.
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET", "VLLM_LOGGING_LEVEL"):
            patch.delenv(name, raising=False)
        with Server(command, report=print, timeout=600) as running:
            yield running


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with running_stub() as running:
        yield running


def connect(page: Page, key: str) -> None:
    """As somebody does with a keyboard alone."""
    expect(page.get_by_label("Key of the server")).to_be_focused()
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def ask(page: Page, prompt: str, panels: int = 1) -> None:
    """Type it, send it, and wait for the whole answer."""
    page.get_by_role("textbox", name="Message").focus()
    page.keyboard.type(prompt)
    page.keyboard.press("Enter")
    expect(page.locator(".state", has_text="Done.")).to_have_count(panels)


def cells(page: Page, grid: str = ".canvas", panel: int = 0) -> list[str]:
    return page.locator(f"{grid} >> nth={panel}").locator(".cell > span").all_inner_texts()


def counter(panel: Locator, name: str) -> float:
    row = panel.locator(".counters > div", has=panel.page.get_by_text(name, exact=True))
    return float(row.locator("dd").inner_text())


def chunks_of(server: Server, prompt: str, **settings: Any) -> list[dict[str, Any]]:
    """The stream of the same question, asked without the page."""
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
            **settings,
        },
    }
    headers = {"Authorization": f"Bearer {server.api_key}"}
    address = f"{server.url}/v1/chat/completions"
    text = httpx.post(address, json=body, headers=headers, timeout=300).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_watch_and_replay(server: Server, new_page: Callable[..., Page]) -> None:
    """A wrong key, the right one, a question, its canvas at every step, and the same from its link."""
    page = new_page(f"{server.url}/diffusion/")
    page.get_by_label("Key of the server").fill("another")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text(
        "Key: the server refused this key; enter another one."
    )
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    connect(page, server.api_key)
    expect(page.get_by_role("alert")).to_have_text("")
    prompt = "Reverse these words: cat, dog, tree."
    ask(page, prompt)

    chunks = chunks_of(server, prompt)
    frames = [chunk for chunk in chunks if chunk.get("type") == "diffusion_frame"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    answer = "".join(delta.get("content") or "" for delta in deltas)
    assert answer.strip()
    expect(page.get_by_role("log").locator("p").last).to_have_text(answer)
    scrubber = page.get_by_role("slider", name="Step")
    assert scrubber.get_attribute("max") == str(len(frames) - 1)
    scrubber.focus()
    page.keyboard.press("Home")
    for index, frame in enumerate(frames):
        shown = [cell.replace("␣", " ").replace("↵", "\n") for cell in cells(page)]
        assert shown == frame["tokens"]
        expect(scrubber).to_have_value(str(index))
        expect(page.locator("output")).to_contain_text(
            f"canvas {frame['block'] + 1}, step {frame['step']} of at most {frame['total']}"
        )
        page.keyboard.press("ArrowRight")
    expect(page.locator(".text .committed")).to_have_text(answer)
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
    expect(theirs.locator(".state")).to_have_text("Done.")
    expect(theirs.get_by_role("log").locator("p").last).to_have_text(answer)
    assert cells(theirs, ".map") == cells(page, ".map")


def test_side_by_side(server: Server, new_page: Callable[..., Page]) -> None:
    """Two choices of settings on one prompt, each with the canvas that it gives."""
    page = new_page(f"{server.url}/diffusion/")
    connect(page, server.api_key)
    page.get_by_label("Compare").check()
    page.get_by_role("group", name="Settings A").get_by_label("Preset").select_option("quality")
    page.get_by_role("group", name="Settings B").get_by_label("Preset").select_option("fast")
    prompt = "What is 7+8?"
    ask(page, prompt, panels=2)
    names = page.locator(".panel h3").all_inner_texts()
    assert names == ["A: preset quality", "B: preset fast"]
    for index, preset in enumerate(("quality", "fast")):
        chunks = chunks_of(server, prompt, diffusion_preset=preset)
        frames = [chunk for chunk in chunks if chunk.get("type") == "diffusion_frame"]
        panel = page.locator(".panel").nth(index)
        assert counter(panel, "Denoising steps") == len(frames)
    link = page.get_by_label("Link to this prompt").input_value()
    theirs = new_page(link)
    connect(theirs, server.api_key)
    expect(theirs.get_by_label("Compare")).to_be_checked()
    for group, preset in (("Settings A", "quality"), ("Settings B", "fast")):
        control = theirs.get_by_role("group", name=group).get_by_label("Preset")
        expect(control).to_have_value(preset)


def test_hostile_tokens(stub: Stub, new_page: Callable[..., Page]) -> None:
    """What a model, a prompt or a link spells is shown, and never run."""
    page = new_page(stub.url)
    connect(page, page_stub.KEY)
    ask(page, "hostile")
    page.get_by_role("slider", name="Step").fill(str(page_stub.STEPS - 1))
    hostile = list(page_stub.HOSTILE)
    assert [cell.replace("␣", " ") for cell in cells(page)[: len(hostile)]] == hostile
    expect(page.get_by_role("log").locator("p").last).to_contain_text("".join(hostile))
    expect(page.locator(".text .committed")).to_have_text("".join(hostile))
    page.get_by_role("slider", name="Step").fill(str(page_stub.STEPS))
    expect(page.locator(".text .committed")).to_have_text("".join(hostile))
    expect(page.locator(".text .draft")).to_contain_text("The end.")
    theirs = new_page(f"{stub.url}#prompt=<script>window.ran=1</script>&turn=<img src=x>&a.<b>=<i>")
    connect(theirs, page_stub.KEY)
    expect(theirs.get_by_role("alert")).to_contain_text("this model does not take <b> of the link")
    expect(theirs.get_by_role("log").locator("p")).to_have_text("<img src=x>")
    for opened in (page, theirs):
        assert opened.evaluate("window.ran") is None
        assert opened.locator("script").count() == 1
        assert opened.locator("img, svg, i").count() == 0


def test_server_dies(new_page: Callable[..., Page]) -> None:
    """In the middle of an answer, whose beginning stays; the page says so and can be used."""
    with running_stub() as dying:
        page = new_page(dying.url)
        connect(page, page_stub.KEY)
        page.get_by_role("textbox", name="Message").fill("die")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("Server: it broke off in the middle")
        expect(page.get_by_role("log").locator("p").last).to_contain_text("what they are told.")
        expect(page.get_by_role("textbox", name="Message")).to_have_value("die")
        page.get_by_role("textbox", name="Message").fill("")
        ask(page, "And now?")
        # What was broken off is no part of the chat.
        assert [m["content"] for m in dying.asked[-1]["messages"]] == ["And now?"]
        expect(page.get_by_role("alert")).to_have_text("")
    page.get_by_role("textbox", name="Message").fill("Is anybody there?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Network: the server cannot be reached")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_problems_in_one_sentence(stub: Stub, new_page: Callable[..., Page]) -> None:
    """Whose fault it is, and that the next message is answered."""
    page = new_page(stub.url)
    connect(page, page_stub.KEY)
    alert = page.get_by_role("alert")
    for prompt, sentence in (
        ("refuse", "Server: it refused the request with status 400: seed must be <b>small</b>."),
        ("another model", "Model: The model `stub` does not exist."),
        ("give up", "Server: it gave the answer up: The engine died."),
    ):
        page.get_by_role("textbox", name="Message").fill(prompt)
        page.keyboard.press("Enter")
        expect(alert).to_have_text(sentence)
        expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    num_asked = len(stub.asked)
    page.get_by_label("Max steps").first.fill("17")
    page.get_by_role("button", name="Send").click()
    expect(alert).to_have_text(
        "Settings: Max steps must be a whole number of at least 1 and at most 16."
    )
    expect(page.get_by_label("Max steps").first).to_be_focused()
    page.get_by_label("Max steps").first.fill("3")
    page.get_by_role("textbox", name="Message").fill("")
    page.keyboard.press("Enter")
    expect(alert).to_have_text("Message: it is empty; write one.")
    assert len(stub.asked) == num_asked
    page.get_by_role("textbox", name="Message").fill("slowly")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".state")).to_have_text("Stopped.")
    expect(alert).to_have_text("")
    page.get_by_role("textbox", name="Message").fill("")
    ask(page, "One.")
    page.get_by_role("textbox", name="Message").fill("")
    ask(page, "Two.")
    asked = stub.asked[-1]
    assert [m["role"] for m in asked["messages"]] == ["user", "assistant", "user"]
    assert asked["vllm_xargs"]["diffusion_max_steps"] == 3


def test_keyboard_and_names(stub: Stub, new_page: Callable[..., Page]) -> None:
    """Everything has a name, and can be reached and moved without a pointer."""
    page = new_page(stub.url, reduced_motion="reduce")
    connect(page, page_stub.KEY)
    ask(page, "Something.")
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, textarea, select, button')].filter(node => "
        "!node.labels?.length && !node.textContent.trim()).map(node => node.outerHTML)"
    )
    assert nameless == []
    page.get_by_role("button", name="Replay").focus()
    page.keyboard.press("Tab")
    scrubber = page.get_by_role("slider", name="Step")
    expect(scrubber).to_be_focused()
    page.keyboard.press("ArrowLeft")
    words = f"canvas 2, step {page_stub.STEPS - 1} of at most 16"
    assert scrubber.get_attribute("aria-valuetext") == words
    page.keyboard.press("Tab")
    positions = page.get_by_role("listbox", name="Canvas").get_by_role("option")
    expect(positions.first).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(positions.nth(1)).to_be_focused()
    label = positions.nth(1).get_attribute("aria-label")
    assert re.match(r'Position 2, "The end\.": entropy \d\.\d\d nats, kept', label or "")
    expect(page.locator(".position")).to_have_text(label or "")
    page.keyboard.press("End")
    expect(positions.last).to_be_focused()
    page.keyboard.press("Tab")
    tokens = page.get_by_role("listbox", name="Step map").get_by_role("option")
    expect(tokens.first).to_be_focused()
    # Committed text is announced, and not what may still change.
    assert page.locator("[aria-live], [role=log], [role=alert], [role=status]").evaluate_all(
        "nodes => nodes.map(node => node.id)"
    ) == ["problem", "log", "copied"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str, stub: Stub, new_page: Callable[..., Page]) -> None:
    """Text can be read on every colour, in both schemes: 4.5 to 1, as WCAG 2.2 asks."""
    page = new_page(stub.url, color_scheme=scheme, reduced_motion="reduce")
    connect(page, page_stub.KEY)
    ask(page, "Something.")
    page.get_by_role("slider", name="Step").fill("1")
    least = page.evaluate(CONTRASTS)
    assert least["contrast"] >= 4.5, least


# The least contrast of a text with what is behind it.
CONTRASTS = """() => {
  const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const bytes = colour => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const luminance = colour => bytes(colour).slice(0, 3).map(byte => byte / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    const colour = getComputedStyle(node).backgroundColor;
    return bytes(colour)[3] || !node.parentElement ? colour : behind(node.parentElement);
  };
  let least = { contrast: 21 };
  for (const node of document.querySelectorAll('body *')) {
    const isText = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (!isText || !node.checkVisibility() || node.disabled) continue;
    const [low, high] = [getComputedStyle(node).color, behind(node)].map(luminance).sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < least.contrast) least = { contrast, text: node.textContent, of: node.className };
  }
  return least;
}"""
