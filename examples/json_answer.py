"""Ask for JSON of a schema: the constraint holds in every denoise step, and the answer parses.

    vllm serve "$(vllm-diffusion checkpoint)" --served-model-name tiny --host 127.0.0.1
    python examples/json_answer.py

``OPENAI_API_KEY`` and ``OPENAI_BASE_URL`` are those of ``openai_client.py``.
"""

import json
import os

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    completion = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Write as JSON: name kite, age 42."}],
        max_tokens=64,
        seed=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "record", "schema": SCHEMA},
        },
    )
    print(json.loads(completion.choices[0].message.content or ""))


if __name__ == "__main__":
    main()
