"""Record the page of the live canvas, from the shipped checkpoint.

    python docs/pictures/record_page.py          # Debian's chromium: apt-get install chromium

Writes three pictures beside this file. ``page.webp`` is animated: one question is asked in a
headless browser, and each step of its answer is an image. ``page_compare.webp`` is a question with
two choices of settings, in the dark scheme, and ``page_phone.webp`` an answer in the middle on a
phone's screen.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli.server import Server

QUESTION = "Add up: 8+14, 8+9, 14+8, 1+1, 19+4, 2+14."
COMPARED = "Reverse these words: cat, dog, tree."
DESK, PHONE = {"width": 1180, "height": 800}, {"width": 400, "height": 800}
# Milliseconds that a step is shown, and the last one.
SHOWN, LAST = 500, 4000
SERVE = (
    *(str(shipped_checkpoint()), "--port", "{port}", "--served-model-name", "tiny"),
    *("--max-model-len", "512", "--max-num-seqs", "2", "--enforce-eager"),
    *("--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}'),
)


@contextmanager
def connected(server: Server, browser: Browser, **options: Any) -> Iterator[Page]:
    """Open the page as somebody new, and connect it."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(f"{server.url}/diffusion/")
    page.get_by_label("Key of the server").fill(server.api_key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)
    yield page
    context.close()


def ask(page: Page, question: str, panels: int = 1) -> None:
    """Ask, and wait for the whole of every answer."""
    page.get_by_role("textbox", name="Message").fill(question)
    page.keyboard.press("Enter")
    expect(page.locator(".state", has_text="Done")).to_have_count(panels, timeout=60_000)


def picture(page: Page) -> Image.Image:
    """Take a picture of what is on the screen, with the keyboard nowhere."""
    page.evaluate("document.activeElement.blur()")
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def steps(page: Page) -> list[Image.Image]:
    """Take a picture of each step of an answer."""
    scrubber = page.get_by_role("slider").first
    last = int(scrubber.get_attribute("max") or 0)
    taken = []
    for step in range(last + 1):
        scrubber.fill(str(step))
        taken.append(picture(page))
    return taken


def save(name: str, taken: list[Image.Image]) -> None:
    """Write a picture, animated if it has several images."""
    path = Path(__file__).with_name(name)
    times = [SHOWN] * (len(taken) - 1) + [LAST]
    taken[0].save(
        path, save_all=True, append_images=taken[1:], duration=times, loop=0, quality=60, method=6
    )
    print(f"{path}: {len(taken)} images, {path.stat().st_size // 1024} KiB")


def main() -> None:
    command = [sys.executable, "-m", "vllm_diffusion.cli.main", "serve-page", *SERVE]
    with Server(command, report=print, timeout=900) as server, sync_playwright() as playwright:
        # As root Chromium has no sandbox of its own.
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        with connected(server, browser, viewport=DESK) as page:
            ask(page, QUESTION)
            save("page.webp", steps(page))
        with connected(server, browser, viewport=DESK, color_scheme="dark") as page:
            page.get_by_label("Compare").check()
            page.get_by_label("Preset (A)").select_option("quality")
            page.get_by_label("Preset (B)").select_option("fast")
            ask(page, COMPARED, panels=2)
            save("page_compare.webp", [picture(page)])
        with connected(server, browser, viewport=PHONE, device_scale_factor=1.5) as page:
            ask(page, QUESTION)
            page.get_by_role("slider").fill("0")
            save("page_phone.webp", [picture(page)])
        browser.close()


if __name__ == "__main__":
    main()
