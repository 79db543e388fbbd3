"""Tests of the page of the live canvas in a real browser, with a stub of its server.

The stub also does what no healthy server does; ``test_page_server.py`` has a real one.
"""

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.doubles import page_stub
from tests.support.doubles.page_browser import CONTRASTS, MARKS, ask, cells, connect, counter, send
from tests.support.doubles.page_stub import Stub, running_stub

pytestmark = MARKS
# A picture of one pixel.
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with running_stub() as running:
        yield running


@pytest.fixture
def page(stub: Stub, new_page: Callable[..., Page]) -> Page:
    """Open the page of the stub and connect to it."""
    opened = new_page(stub.url)
    connect(opened, page_stub.KEY)
    return opened


def test_hostile_tokens(page: Page, stub: Stub, new_page: Callable[..., Page]) -> None:
    """Text of a model, a prompt or a link is shown, and never run."""
    ask(page, "hostile")
    page.get_by_role("slider", name="Step").fill(str(page_stub.STEPS - 1))
    hostile = list(page_stub.HOSTILE)
    assert [cell.replace("␣", " ") for cell in cells(page)[: len(hostile)]] == hostile
    expect(page.get_by_role("log").locator(".said").last).to_contain_text("".join(hostile))
    expect(page.locator(".text .emitted")).to_have_text("".join(hostile))
    page.get_by_role("slider", name="Step").fill(str(page_stub.STEPS))
    expect(page.locator(".text .emitted")).to_have_text("".join(hostile))
    expect(page.locator(".text .draft")).to_contain_text("The end.")
    theirs = new_page(f"{stub.url}#prompt=<script>window.ran=1</script>&turn=<img src=x>&a.<b>=<i>")
    connect(theirs, page_stub.KEY)
    expect(theirs.get_by_role("alert")).to_contain_text("this model does not take <b> of the link")
    expect(theirs.get_by_role("log").locator(".said")).to_have_text("<img src=x>")
    for opened in (page, theirs):
        assert opened.evaluate("window.ran") is None
        assert opened.locator("script").count() == 1
        assert opened.locator("img, svg, i").count() == 0


def test_server_dies(new_page: Callable[..., Page]) -> None:
    """If the server dies in an answer, its beginning stays and the page reports the failure."""
    with running_stub() as dying:
        page = new_page(dying.url)
        connect(page, page_stub.KEY)
        send(page, "die")
        expect(page.get_by_role("alert")).to_contain_text("Server: it broke off in the middle")
        expect(page.get_by_role("log").locator(".said").last).to_contain_text("what they are told.")
        expect(page.get_by_role("textbox", name="Message")).to_have_value("die")
        ask(page, "And now?")
        # An answer that was broken off is not part of the chat.
        assert [m["content"] for m in dying.asked[-1]["messages"]] == ["And now?"]
        expect(page.get_by_role("alert")).to_have_text("")
    send(page, "Is anybody there?")
    expect(page.get_by_role("alert")).to_contain_text("Network: the server cannot be reached")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_problems_in_one_sentence(page: Page, stub: Stub) -> None:
    """A problem is reported with its cause, and the next message is answered."""
    alert = page.get_by_role("alert")
    for prompt, sentence in (
        ("refuse", "Server: it refused the request with status 400: seed must be <b>small</b>."),
        ("another model", "Model: The model `stub` does not exist."),
        ("give up", "Server: it gave the answer up: The engine died."),
    ):
        send(page, prompt)
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
    send(page, "")
    expect(alert).to_have_text("Message: it is empty; write one.")
    assert len(stub.asked) == num_asked
    send(page, "slowly")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".state")).to_have_text("Stopped")
    expect(alert).to_have_text("")
    ask(page, "One.")
    ask(page, "Two.")
    asked = stub.asked[-1]
    assert [m["role"] for m in asked["messages"]] == ["user", "assistant", "user"]
    assert asked["vllm_xargs"]["diffusion_max_steps"] == 3


def test_keyboard_and_names(stub: Stub, new_page: Callable[..., Page]) -> None:
    """Every control has a name, and can be reached and moved without a pointer."""
    page = new_page(stub.url, reduced_motion="reduce")
    connect(page, page_stub.KEY)
    ask(page, "Something.")
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, textarea, select, button')].filter(node => "
        "!node.labels?.length && !node.ariaLabel && !node.textContent.trim()).map(node => node.outerHTML)"
    )
    assert nameless == []
    page.get_by_role("button", name="Replay").focus()
    page.keyboard.press("Tab")
    scrubber = page.get_by_role("slider", name="Step")
    expect(scrubber).to_be_focused()
    page.keyboard.press("ArrowLeft")
    words = f"canvas 2 of 2, step {page_stub.STEPS - 1} of at most 16"
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
    expect(page.get_by_role("button", name="+29 end tokens")).to_be_focused()
    page.keyboard.press("Tab")
    tokens = page.get_by_role("listbox", name="Step map").get_by_role("option")
    expect(tokens.first).to_be_focused()
    # Committed text is announced, and not what may still change.
    assert page.locator("[aria-live], [role=log], [role=alert], [role=status]").evaluate_all(
        "nodes => nodes.map(node => node.id)"
    ) == ["problem", "log", "copied"]


def test_key_form(stub: Stub, new_page: Callable[..., Page]) -> None:
    """The key form folds once connected, opens on request, and is absent without a key."""
    page = new_page(stub.url)
    form = page.locator("#connect")
    change = page.get_by_role("button", name="Connected, change key")
    expect(form).to_be_visible()
    expect(change).to_be_hidden()
    hint = page.locator("#prompt-hint")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    # Where it is, too; what cannot be done yet is not suggested.
    expect(hint).to_contain_text("Enter the key first, at the top: the VLLM_API_KEY")
    expect(page.locator("#nothing")).to_contain_text("Enter the key, then send a message")
    connect(page, page_stub.KEY)
    expect(form).to_be_hidden()
    expect(hint).to_contain_text("Enter sends it")
    expect(page.locator("#nothing")).to_contain_text("Send a message, and watch")
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    ask(page, "Something.")
    change.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Key of the server")).to_be_focused()
    expect(change).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(form).to_be_hidden()
    expect(change).to_have_attribute("aria-expanded", "false")
    change.click()
    page.keyboard.type("another")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Key: the server refused this key")
    expect(change).to_be_hidden()
    connect(page, page_stub.KEY)
    expect(change).to_be_visible()
    expect(page.get_by_role("log").locator(".said").first).to_have_text("Something.")
    with running_stub(key=None) as open_to_all:
        page = new_page(open_to_all.url)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.locator("#connect")).to_be_hidden()
        expect(page.locator("#change-key")).to_be_hidden()


def test_narrow_screen(new_page: Callable[..., Page]) -> None:
    """Nothing is wider than 400 pixels, with a path as the model's name and two choices.

    After connecting, focus goes to the message and the header stays in view.
    """
    with running_stub(name="/a/path/that/goes/on" * 8) as stub:
        page = new_page(stub.url, viewport={"width": 400, "height": 600})
        expect(page.locator("#prompt-hint")).to_be_visible()
        connect(page, page_stub.KEY)
        message = page.get_by_role("textbox", name="Message")
        expect(message).to_be_focused()
        page.keyboard.type("Hello")
        # A scroll is there in the next frame.
        page.evaluate("new Promise(requestAnimationFrame)")
        assert page.evaluate("scrollY") == 0
        message.fill("")
        page.get_by_label("Compare two choices").check()
        page.get_by_text("More", exact=True).click()
        ask(page, "hostile", panels=2)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 400


def test_markdown(page: Page, stub: Stub) -> None:
    """An answer is shown as Markdown without links, with its canvas and raw text a click away."""
    ask(page, "markdown")
    said = page.get_by_role("log").locator(".said").last
    for tag, text in (
        ("h4", "Seasons"),
        ("ol > li > ul code", "tulip"),
        ("ol em", "spring"),
        ("ol > li:last-child", "autumn &wind"),
        ("table tr:last-child td:last-child", "31"),
        ("pre code", "<b>code</b>"),
    ):
        assert said.locator(tag).text_content().strip() == text
    expect(said).to_contain_text("[a link](http://127.0.0.1/elsewhere)")
    expect(said).to_contain_text("![a picture](http://127.0.0.1/p.png) <i>slanted</i>")
    assert said.locator("a, img, i").count() == 0
    # What the model goes on from, and a link holds, is what it wrote.
    ask(page, "Something.")
    assert stub.asked[-1]["messages"][1]["content"].startswith(page_stub.MARKDOWN)
    expect(page.locator(".text")).not_to_contain_text("Seasons")
    page.get_by_role("button", name="Canvas").first.click()
    expect(page.locator(".text")).to_contain_text("## Seasons")
    assert "prompt=markdown" in page.get_by_label("Link to this prompt").input_value()
    expect(page.get_by_role("slider", name="Step")).to_be_enabled()


def test_markdown_without_end(stub: Stub, new_page: Callable[..., Page]) -> None:
    """An answer of thousands of nested quotations stays plain text."""
    page = new_page(stub.url)
    shown = page.evaluate(
        "import('./markdown.js').then(({ rendered }) => rendered('>'.repeat(9999)).join('').length)"
    )
    assert shown == 9999


def test_system_prompt_and_picture(
    tmp_path: Path, page: Page, stub: Stub, new_page: Callable[..., Page]
) -> None:
    """A system prompt goes with every message and the link, a picture with one message."""
    picture = tmp_path / "dot.png"
    picture.write_bytes(base64.b64decode(DOT))
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Picture", exact=True).set_input_files(picture)
    ask(page, "What is this?")
    sent = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DOT}"}}
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": [sent, {"type": "text", "text": "What is this?"}]}
    assert stub.asked[-1]["messages"] == [system, question]
    expect(page.get_by_role("log").get_by_alt_text("The picture")).to_be_visible()
    ask(page, "Are you sure?")
    messages = stub.asked[-1]["messages"]
    assert messages[:2] == [system, question]
    assert messages[3] == {"role": "user", "content": "Are you sure?"}
    link = page.get_by_label("Link to this prompt").input_value()
    assert "base64" not in link
    theirs = new_page(link)
    connect(theirs, page_stub.KEY)
    expect(theirs.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(theirs.locator(".entry.you .said")).to_have_text("What is this?")


def test_ways(page: Page, stub: Stub) -> None:
    """The settings offer the server's ways, and a way without a canvas requests no frames."""
    first, second = page.locator("#choices > .field label").all_inner_texts()[:2]
    assert (first, second) == ("Way to decode", "Preset")
    page.get_by_role("combobox", name="Way to decode").select_option("linear_spec")
    ask(page, "Something.")
    assert stub.asked[-1]["vllm_xargs"]["diffusion_rule"] == "linear_spec"
    assert stub.asked[-1]["vllm_xargs"]["diffusion_frames"] == 1
    page.get_by_role("combobox", name="Way to decode").select_option("autoregressive")
    ask(page, "Something.")
    assert stub.asked[-1]["vllm_xargs"] == {"diffusion_rule": "autoregressive"}
    expect(page.get_by_role("log").locator(".said").last).to_have_text("Token by token.")
    expect(page.locator(".text")).to_have_text("Token by token.")
    expect(page.locator(".position")).to_contain_text("there is no canvas")
    assert cells(page) == []


def test_end_token_explained(page: Page) -> None:
    """The legend names the end tokens, and one on the canvas is shown whole."""
    ask(page, "Something.")
    expect(page.locator("#ends")).to_have_text(
        re.compile("^(<eos> or <turn.>|<turn.> or <eos>) ends the answer$")
    )
    end = page.locator(".canvas .cell.end:visible")
    expect(end).to_have_text("<eos>")
    assert end.get_attribute("aria-label").endswith("it ends the answer, and is not part of it")
    # As wide as two, which hold a name like <|im_end|>.
    end.locator("span").evaluate("node => { node.textContent = '<|im_end|>'; }")
    assert end.locator("span").evaluate("node => node.scrollWidth <= node.clientWidth")


@pytest.mark.slow
def test_cold_server(page: Page) -> None:
    """Before the first step the page shows an empty canvas and running seconds."""
    send(page, "cold")
    expect(page.locator(".state")).to_have_text("Waiting for the first step")
    assert cells(page) == [""] * page_stub.CANVAS_LENGTH
    first = counter(page.locator(".panel"), "Seconds")
    page.wait_for_function(
        "number => document.querySelector('.counters > div:last-child dd').textContent > number",
        arg=first,
    )
    expect(page.locator(".state")).to_have_text("Waiting for the first step")
    expect(page.locator(".state")).to_have_text("Done")
    ended = counter(page.locator(".panel"), "Seconds")
    page.wait_for_timeout(300)
    assert counter(page.locator(".panel"), "Seconds") == ended


@pytest.mark.parametrize(
    ("width", "height"),
    [(1280, 900), pytest.param(400, 800, marks=pytest.mark.slow)],
    ids=["desk", "phone"],
)
def test_canvas_in_view(width: int, height: int, stub: Stub, new_page: Callable[..., Page]) -> None:
    """The canvas of an answer that begins is next to or above the chat, and on the screen."""
    page = new_page(stub.url, viewport={"width": width, "height": height})
    connect(page, page_stub.KEY)
    page.get_by_text("More", exact=True).click()
    message = page.get_by_role("textbox", name="Message")
    message.fill("slowly")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.keyboard.press("Enter")
    expect(page.locator("output")).to_contain_text("step 1 of")
    expect(page.locator(".canvas .cell").first).to_be_in_viewport(ratio=1)
    # Nor is it hidden by the message box, which stays at the bottom of a phone's screen.
    uncovered = """nodes => nodes.filter(node => node.checkVisibility()).every(node => {
        const { left, top, width, height } = node.getBoundingClientRect();
        return node.contains(document.elementFromPoint(left + width / 2, top + height / 2));
    })"""
    assert page.locator(".canvas .cell").evaluate_all(uncovered)
    canvas, chat = page.locator("#canvases").bounding_box(), page.locator("#talk").bounding_box()
    assert canvas
    assert chat
    if width > 1000:
        assert canvas["x"] >= chat["x"] + chat["width"]
    else:
        assert canvas["y"] + canvas["height"] <= chat["y"]
        expect(message).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    scrolled = page.evaluate("scrollY")
    expect(page.locator(".state")).to_have_text("Done")
    assert page.evaluate("scrollY") == scrolled


def test_fold_after_the_end(page: Page) -> None:
    """Tokens after the first end token are folded into a button that shows them."""
    ask(page, "Something.")
    positions = page.get_by_role("listbox", name="Canvas").get_by_role("option")
    fold = page.locator(".canvas .fold")
    expect(positions).to_have_count(3)
    expect(fold).to_have_text("+29 end tokens")
    # Nothing but the answer is on the grid: its last position is followed by the button.
    last, button = positions.last.bounding_box(), fold.bounding_box()
    assert last
    assert button
    assert button["y"] < last["y"] + last["height"]
    fold.focus()
    page.keyboard.press("Enter")
    expect(fold).to_have_attribute("aria-expanded", "true")
    expect(positions).to_have_count(page_stub.CANVAS_LENGTH)
    positions.last.focus()
    page.get_by_role("slider", name="Step").fill(str(page_stub.STEPS))
    expect(fold).to_have_text("Hide 29 after the end")
    fold.click()
    expect(positions).to_have_count(3)
    expect(fold).to_have_text("+29 after the end")
    # In the first step of the first canvas noise stands before the first end token.
    page.get_by_role("slider", name="Step").fill("0")
    expect(positions.nth(9)).to_have_text("noise␣")
    expect(positions).to_have_count(11)


def test_past_the_cap(page: Page) -> None:
    """A canvas that a constraint takes past its step cap shows no smaller total."""
    ask(page, "past the cap")
    scrubber, output = page.get_by_role("slider", name="Step"), page.locator("output")
    expect(output).to_contain_text("canvas 2 of 2, step 6, 2 past the cap of 4: ")
    assert scrubber.get_attribute("aria-valuetext") == "canvas 2 of 2, step 6, 2 past the cap of 4"
    scrubber.fill("3")
    expect(output).to_contain_text("canvas 1 of 2, step 4 of at most 4: ")
    heats = page.locator(".map .cell").evaluate_all(
        "nodes => nodes.map(node => Number(node.style.getPropertyValue('--heat')))"
    )
    assert max(heats) == 1


def test_text_before_its_frames(page: Page) -> None:
    """A canvas whose tokens come before its frames is not shown twice."""
    ask(page, "early")
    answer = page.get_by_role("log").locator(".said").last.inner_text()
    expect(page.locator(".text")).to_have_text(answer)
    page.get_by_role("slider", name="Step").fill("0")
    expect(page.locator(".text .emitted")).to_be_empty()


def test_empty_answers(page: Page, stub: Stub) -> None:
    """An answer without text shows why it ended instead."""
    for prompt, why in (
        ("end at once", "the model ended it with its first token"),
        ("say nothing", "the model ended it after 3 tokens without text"),
        ("be cut", "it was cut at its longest, 1 token"),
        ("be stuck", "the grammar allows no token"),
        ("repeat", "its tokens repeated themselves"),
        ("think", "the model ended it after its thought"),
    ):
        ask(page, prompt)
        expect(page.get_by_role("log").locator(".said").last).to_have_text(f"No text: {why}.")
        expect(page.locator(".text")).to_have_text("Hm." if prompt == "think" else "")
    # Messages of the page are not part of the chat.
    answers = [m["content"] for m in stub.asked[-1]["messages"] if m["role"] == "assistant"]
    assert answers == [""] * 5
    send(page, "give up")
    expect(page.get_by_role("alert")).to_contain_text("it gave the answer up")
    expect(page.get_by_role("log").locator(".said").last).to_contain_text("what they are told.")


@pytest.mark.slow
def test_settings_that_differ(page: Page) -> None:
    """One heading names the settings, and differences of A and B are marked at their canvases."""
    ask(page, "One.")
    expect(page.get_by_text(re.compile("^Settings"))).to_have_count(1)
    expect(page.get_by_role("heading", name="Settings")).to_have_count(1)
    page.get_by_label("Compare").check()
    marks = page.get_by_text("A and B differ")
    expect(marks).to_have_count(0)
    page.get_by_label("Preset (B)").select_option("fast")
    page.get_by_label("Max steps (A)").fill("3")
    page.get_by_label("Max steps (B)").fill("3")
    expect(marks).to_have_count(1)
    preset = page.get_by_label("Preset (A)")
    described = preset.evaluate(
        "node => node.getAttribute('aria-describedby').split(' ')"
        ".map(id => document.getElementById(id).textContent).join(' ')"
    )
    assert described.endswith("A and B differ")
    ask(page, "Two.", panels=2)
    assert page.locator(".panel h3").all_inner_texts() == [
        "A: max steps 3, the server's preset",
        "B: max steps 3, preset fast",
    ]
    assert page.locator(".panel mark").all_inner_texts() == ["the server's preset", "preset fast"]
    expect(page.get_by_text(re.compile("^Settings"))).to_have_count(1)
    preset.select_option("fast")
    expect(marks).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_contrast(scheme: str, stub: Stub, new_page: Callable[..., Page]) -> None:
    """Text has a contrast of 4.5 to 1 on every color in both schemes, as WCAG 2.2 requires."""
    page = new_page(stub.url, color_scheme=scheme, reduced_motion="reduce")
    connect(page, page_stub.KEY)
    ask(page, "Something.")
    page.get_by_role("slider", name="Step").fill("1")
    least = page.evaluate(CONTRASTS)
    assert least["contrast"] >= 4.5, least
