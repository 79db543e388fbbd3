"""Watch a canvas settle: the frames of a streamed answer, one after each denoise step.

    vllm serve "$(vllm-diffusion checkpoint)" --served-model-name tiny --host 127.0.0.1
    python examples/live_canvas.py "Count: oak, elm, ash, oak."

``OPENAI_API_KEY`` and ``OPENAI_BASE_URL`` are those of ``openai_client.py``.
docs/use/live-canvas.md lists what a frame holds.
"""

import os
import sys

from openai import OpenAI


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Write in upper case: lamp, river, stone, cloud."
    client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    chunks = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=128,
        seed=0,
        stream=True,
        extra_body={"diffusing": True},
    )
    answer = ""
    for chunk in chunks:
        # A frame is a chunk with an empty delta, so that other clients skip it.
        frame = chunk.model_extra or {}
        if frame.get("type") == "diffusion_frame":
            print(f"canvas {frame['block']}, step {frame['step']:2}: {frame['text']!r}")
        answer += "".join(choice.delta.content or "" for choice in chunk.choices)
    print(f"answer: {answer}")


if __name__ == "__main__":
    main()
