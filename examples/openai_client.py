"""Ask a server that is running, with the official ``openai`` client.

    vllm serve "$(vllm-diffusion checkpoint)" --served-model-name tiny --host 127.0.0.1
    python examples/openai_client.py

``OPENAI_API_KEY`` is the server's key; ``OPENAI_BASE_URL`` is where it is, by default
``http://127.0.0.1:8000/v1``.
"""

import os

from openai import OpenAI


def main() -> None:
    client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is 7+8?"}]

    completion = client.chat.completions.create(
        model=model, messages=messages, max_tokens=64, seed=0
    )
    print("answer:   ", completion.choices[0].message.content)

    # A chunk is a canvas: the tokens of one are denoised together.
    chunks = client.chat.completions.create(
        model=model, messages=messages, max_tokens=64, seed=0, stream=True
    )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    print("streamed: ", "".join(pieces))

    # Fewer denoise steps are faster and less careful. docs/use/settings.md lists what can be set.
    completion = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=64,
        seed=0,
        extra_body={"vllm_xargs": {"diffusion_max_steps": 4}},
    )
    print("4 steps:  ", completion.choices[0].message.content)


if __name__ == "__main__":
    main()
