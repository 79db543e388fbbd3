"""Tests of tool calls, thoughts and frames of a masked model, by vLLM's parsers over HTTP.

The shipped SDAR was trained on neither: a grammar writes its calls, and its thoughts are pinned.
Its tokenizer gets the two tokens of Qwen's thoughts instead of two unused ones.
"""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.end_to_end.test_tools import RECORD
from tests.support.engines.server import MODEL, Server, start_server
from tests.support.engines.streams import OrderedStream
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = pytest.mark.engine

BLOCK, FILL = 8, 4
THINK, END_OF_THOUGHT = 282, 283
TOOL = {"name": "store", "description": "Store it.", "parameters": RECORD, "strict": True}


@pytest.fixture(scope="module")
def masked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("masked")
    checkpoint = folder / "sdar"
    shutil.copytree(shipped_checkpoint("sdar"), checkpoint)
    say_thoughts(checkpoint)
    options = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    with start_server(
        checkpoint, folder / "server.log", *options, "--reasoning-parser", "qwen3"
    ) as running:
        yield running


def say_thoughts(checkpoint: Path) -> None:
    """Name the tokens, and let the template end an unwanted thought, as Qwen's does."""
    tokenizer = checkpoint / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    for token in content["added_tokens"]:
        name = {THINK: "<think>", END_OF_THOUGHT: "</think>"}.get(token["id"])
        if name is not None:
            content["model"]["vocab"].pop(token["content"], None)
            content["model"]["vocab"][name] = token["id"]
            token |= {"content": name, "special": False}
    tokenizer.write_text(json.dumps(content))
    template = checkpoint / "chat_template.jinja"
    no_thought = (
        "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    template.write_text(template.read_text().rstrip("\n") + no_thought)


def request_of(server: Server, **fields: Any) -> dict[str, Any]:
    """Return a chat whose prompt ends with a block."""
    for padding in range(BLOCK):
        messages = [{"role": "user", "content": "Make a JSON record: name bob" + "." * padding}]
        body = {"messages": messages, "tools": fields.get("tools")}
        if server.post("/tokenize", body).json()["count"] % BLOCK == 0:
            break
    return {"model": MODEL, "messages": messages, "max_tokens": 160, "seed": 1, **fields}


def pinned(tokens: list[int]) -> dict[str, Any]:
    """Return a first canvas that begins with these tokens."""
    canvas = tokens + [FILL] * (BLOCK - len(tokens))
    return {"diffusion_seed_canvas": canvas, "diffusion_pinned": list(range(len(tokens)))}


SHOWN = {"diffusion_frames": 1, "diffusion_step_map": 1}
CHAT = {"messages": [{"role": "user", "content": "Count from 1 to 16."}]}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "two answers": ("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1.0}),
    "special tokens": ("/v1/chat/completions", {**CHAT, "ignore_eos": True}),
    "completions": (
        "/v1/completions",
        {"prompt": ["One two", "Red"], "n": 2, "temperature": 1.0, "ignore_eos": True},
    ),
    "repetition": (
        "/v1/completions",
        {
            "prompt": "One two",
            "ignore_eos": True,
            "logit_bias": {"40": 100},
            "repetition_detection": {"max_pattern_size": 2, "min_count": 5},
        },
    ),
    "stop token": (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {"41": 9}, "stop_token_ids": [41]},
    ),
}


def read(server: Server, name: str, seed: int = 1, **xargs: Any) -> OrderedStream:
    path, body = ASKED[name]
    body = {"max_tokens": 43, "seed": seed, **body, "vllm_xargs": {**SHOWN, **xargs}}
    return OrderedStream(server, path, body)


@pytest.mark.parametrize("name", ASKED)
def test_frames_say_what_is_committed(name: str, masked_server: Server) -> None:
    """Each frame follows the tokens of the canvas before, and none follows the stream's end."""
    stream = read(masked_server, name)
    num_choices = {"two answers": 2, "completions": 4}.get(name, 1)
    assert len(stream.frames) == len(stream.step_maps) == num_choices
    if name == "repetition":
        # Found in the middle of a canvas.
        assert stream.num_tokens == 5
    elif name != "stop token":
        assert stream.frames[0][-1]["block"] >= 2


def test_frames_have_their_places_under_load(masked_server: Server) -> None:
    """If several canvases wait for their reader, no frame is merged or late."""
    with ThreadPoolExecutor(16) as pool:
        names = ["chat", "completions", "two answers", "special tokens"] * 8
        streams = list(pool.map(lambda i: read(masked_server, names[i], i), range(len(names))))
    assert sum(len(frames) for stream in streams for frames in stream.frames.values()) > 300


def test_frames_of_a_thought_and_of_a_call(masked_server: Server) -> None:
    """A frame has the parsers' thought, text and arguments of its canvas."""
    thought = masked_server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})
    tokens = [THINK, *thought.json()["tokens"], END_OF_THOUGHT]
    request = request_of(
        masked_server, ignore_eos=True, vllm_xargs={**SHOWN, **pinned([*tokens, *tokens[1:-1]])}
    )
    stream = OrderedStream(masked_server, "/v1/chat/completions", request)
    assert stream.choices[0].thought == "ab"
    assert stream.choices[0].text.startswith("ab")
    request = request_of(
        masked_server,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice="required",
        vllm_xargs={**SHOWN, **pinned([THINK, 40, 41, END_OF_THOUGHT])},
    )
    stream = OrderedStream(masked_server, "/v1/chat/completions", request)
    assert stream.choices[0].thought
    jsonschema.validate(json.loads(stream.arguments(0)), RECORD)
