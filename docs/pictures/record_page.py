"""Record the page of the live canvas as an animated picture, from the shipped checkpoint.

    python docs/pictures/record_page.py          # Debian's chromium: apt-get install chromium

Asks one question in a headless browser, waits for the answer, and steps through its canvases with the
page's scrubber; each step is an image of ``page.webp`` beside this file.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.cli.server import Server

QUESTION = "Add up: 8+14, 8+9, 14+8, 1+1, 19+4, 2+14."
SIZE = {"width": 960, "height": 900}
# Milliseconds that a step is shown, and the last one.
SHOWN, LAST = 500, 4000
SERVE = (
    *(str(shipped_checkpoint()), "--port", "{port}", "--served-model-name", "tiny"),
    *("--max-model-len", "512", "--max-num-seqs", "2", "--enforce-eager"),
    *("--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}'),
)


def images(page: Page) -> list[Image.Image]:
    """What the page shows at each step of its answer."""
    scrubber = page.get_by_role("slider").first
    last = int(scrubber.get_attribute("max") or 0)
    taken = []
    for step in range(last + 1):
        scrubber.fill(str(step))
        taken.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    return taken


def main() -> None:
    command = [sys.executable, "-m", "vllm_diffusion.cli.main", "serve-page", *SERVE]
    with Server(command, report=print, timeout=900) as server, sync_playwright() as playwright:
        # As root Chromium has no sandbox of its own.
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(f"{server.url}/diffusion/")
        page.get_by_label("Key of the server").fill(server.api_key)
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)
        page.get_by_role("textbox", name="Message").fill(QUESTION)
        page.keyboard.press("Enter")
        expect(page.locator(".state", has_text="Done.")).to_have_count(1, timeout=60_000)
        taken = images(page)
        browser.close()
    path = Path(__file__).with_name("page.webp")
    times = [SHOWN] * (len(taken) - 1) + [LAST]
    taken[0].save(
        path, save_all=True, append_images=taken[1:], duration=times, loop=0, quality=60, method=6
    )
    print(f"{path}: {len(taken)} steps, {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
