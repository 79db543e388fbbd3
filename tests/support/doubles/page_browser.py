"""Chromium with the page of the live canvas, and a user's actions."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium")
MARKS = [
    pytest.mark.engine,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium"),
]
# Longer than anything here takes on two busy cores.
MILLISECONDS = 60_000


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Start Debian's Chromium in headless mode."""
    expect.set_options(timeout=MILLISECONDS)
    with sync_playwright() as playwright:
        # As root Chromium has no sandbox of its own.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@contextmanager
def opening_pages(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open addresses in a fresh profile each, without what another page knows."""
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


def connect(page: Page, key: str) -> None:
    """Connect by the keyboard alone."""
    expect(page.get_by_label("Key of the server")).to_be_focused()
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def send(page: Page, prompt: str) -> None:
    """Write a message in place of what is there, and send it."""
    page.get_by_role("textbox", name="Message").fill(prompt)
    page.keyboard.press("Enter")


def ask(page: Page, prompt: str, panels: int = 1) -> None:
    """Send a message, and wait for the whole answer."""
    send(page, prompt)
    expect(page.locator(".state", has_text="Done")).to_have_count(panels)


def cells(page: Page, grid: str = ".canvas") -> list[str]:
    return page.locator(f"{grid} >> nth=0").locator(".cell > span").all_inner_texts()


def counter(panel: Locator, name: str) -> float:
    row = panel.locator(".counters > div", has=panel.page.get_by_text(name, exact=True))
    return float(row.locator("dd").inner_text())


# The least contrast of a text with its background.
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
