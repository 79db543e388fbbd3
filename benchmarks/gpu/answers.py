"""Whether a server with its defaults answers rightly: held-out questions to the shipped checkpoint.

    python benchmarks/gpu/answers.py

Kernels that are right one by one do not show that a pass puts the right rows before them. One more
question holds its answer to a JSON schema, where the packages are installed without which a server
refuses grammars.
"""

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

# What it shares with the other benchmarks, one of which makes the questions importable.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from records import Rows, parser_of
from serving import VLLM
from timing import place
from tiny_tasks import FAMILIES, Example, evaluation_set, is_correct

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli.client import ServerError, openai_client
from vllm_diffusion.cli.server import HOST, Server

AT_ONCE = 16
# Longer than any answer.
MAX_TOKENS = 192
GRAMMAR_PACKAGES = ("jsonschema", "llguidance", "lmformatenforcer")
# The checkpoint's own answers have no such keys.
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["ant", "bee"]}, "legs": {"type": "integer", "maximum": 99}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


def is_answered(server: Server, example: Example) -> bool:
    """Whether the server's answer is exact."""
    with openai_client(server.url, server.api_key) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=example.messages, max_tokens=MAX_TOKENS
        )
    return is_correct(example, answer.choices[0].message.content or "")


def is_held(server: Server) -> bool:
    """Whether the answer to a request with a JSON schema is valid against it."""
    import jsonschema

    with openai_client(server.url, server.api_key) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Name an insect."}],
            max_tokens=MAX_TOKENS,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "insect", "schema": SCHEMA},
            },
        )
    try:
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=40, help="of each family of questions")
    options = parser.parse_args()
    data = Rows(options.data)
    command = [*VLLM, "serve", str(shipped_checkpoint()), "--host", HOST, "--port", "{port}"]
    command += ["--served-model-name", "tiny"]
    try:
        with (
            Server(command, report=partial(print, file=sys.stderr)) as server,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            for family in FAMILIES:
                asked = evaluation_set(family, options.prompts)
                exact = sum(pool.map(partial(is_answered, server), asked))
                data.add("answers", family=family, asked=len(asked), exact=exact)
            if all(map(importlib.util.find_spec, GRAMMAR_PACKAGES)):
                data.add("grammars", question="JSON schema", broken=int(not is_held(server)))
    except ServerError as error:
        sys.exit(str(error))
    print(place())
    return 0


if __name__ == "__main__":
    sys.exit(main())
