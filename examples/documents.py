"""Read a page: its text, from a server that is running, as it is written.

    vllm serve opendatalab/MinerU-Diffusion-V1-0320-2.5B --host 127.0.0.1
    python examples/documents.py page.png

Without a file it draws a page of its own; with ``--lines 60 17283 4096`` one of large digits, which
the tiny model of ``vllm-diffusion checkpoint --family mineru`` reads. ``OPENAI_API_KEY`` is the
server's key. ``--task "Table Recognition"``, ``"Formula Recognition"`` and ``"Layout
Analysis"`` are what else the checkpoint was trained on.
"""

import argparse
import base64
import io
from pathlib import Path

from openai import OpenAI
from PIL import Image, ImageDraw

LINES = ("Invoice 42", "", "2 lamps   18.00", "1 chair   35.00", "", "Total     53.00")


def draw_page() -> Image.Image:
    page = Image.new("RGB", (640, 480), "white")
    ImageDraw.Draw(page).multiline_text(
        (40, 40), "\n".join(LINES), fill="black", font_size=32, spacing=16
    )
    return page


def draw_lines(lines: list[str]) -> Image.Image:
    """Draw up to three lines of up to five digits, which fill a square page."""
    page = Image.new("RGB", (480, 480), "white")
    ImageDraw.Draw(page).multiline_text(
        (30, 0), "\n".join(lines), fill="black", font_size=140, spacing=20
    )
    return page


def data_url(page: Image.Image) -> str:
    file = io.BytesIO()
    page.convert("RGB").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Read a page with a server that is running.")
    parser.add_argument("page", nargs="?", type=Path, help="a picture; default: a page is drawn")
    parser.add_argument("--lines", nargs="+", help="digits; draws these instead")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--task", default="Text Recognition", help="default: %(default)s")
    arguments = parser.parse_args()
    drawn = draw_lines(arguments.lines) if arguments.lines else draw_page()
    page = Image.open(arguments.page) if arguments.page else drawn
    client = OpenAI(base_url=arguments.url)
    chunks = client.chat.completions.create(
        model=arguments.model or client.models.list().data[0].id,
        # In its publisher's words.
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url(page)}},
                    {"type": "text", "text": f"\n{arguments.task}:"},
                ],
            },
        ],
        # The likeliest reading.
        temperature=0,
        stream=True,
    )
    # A chunk is a block of 32 tokens, which are denoised together.
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
