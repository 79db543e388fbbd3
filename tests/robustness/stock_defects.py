"""What requests do to stock vLLM: a server without this package's models, and what it answers.

    python -m tests.robustness.stock_defects

serves an ordinary Gemma 4, of random weights, with vLLM's own classes and prints a line for each
request. Where there is no accelerator the platform of this package stands in for one
(``VLLM_PLUGINS=vllm_diffusion_cpu``); with one, ``VLLM_PLUGINS=`` leaves nothing of it. The last
request ends the engine. ``docs/use/why.md`` holds what was printed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.checkpoints import SHIPPED
from tests.support.server import Server, start_server

_HUGE = 10**30


def ordinary_model(folder: Path) -> Path:
    """Gemma 4 of the shipped checkpoint's sizes, with its tokenizer and no weights."""
    weights = shutil.ignore_patterns("*.safetensors", "generation_config.json")
    shutil.copytree(SHIPPED, folder, ignore=weights, dirs_exist_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # vLLM takes whatever has one for a diffusion model.
    del config["canvas_length"]
    config |= {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    config["text_config"] |= {
        "model_type": "gemma4_text",
        "enable_moe_block": True,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }
    path.write_text(json.dumps(config))
    return folder


def _image(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}]}


def requests() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What to say of a request, its path and its body; the one that ends the engine is last."""
    completion, chat, responses = "/v1/completions", "/v1/chat/completions", "/v1/responses"
    yield "an ordinary one", completion, {"prompt": "a"}
    for value in ("text", 5, ["a"]):
        yield (
            f"`vllm_xargs: {json.dumps({'kv_transfer_params': value})}`",
            completion,
            {"prompt": "a", "vllm_xargs": {"kv_transfer_params": value}},
        )
    for value in ("text", 5, []):
        yield (
            f"`structured_outputs: {json.dumps(value)}`",
            completion,
            {"prompt": "a", "structured_outputs": value},
        )
    for field in ("top_k", "stream_interval"):
        yield f"`{field}: 10**30`", completion, {"prompt": "a", field: _HUGE}
    yield (
        "`repetition_detection: {min_count: 10**30, ...}`",
        completion,
        {"prompt": "a", "repetition_detection": {"max_pattern_size": 4, "min_count": _HUGE}},
    )
    for penalty in (1e39, -1e39):
        beam = {"prompt": "a", "use_beam_search": True, "n": 2, "length_penalty": penalty}
        yield f"`use_beam_search`, `length_penalty: {penalty:g}`", completion, beam
    yield "`min_p: 2`", completion, {"prompt": "a", "min_p": 2}
    for url in (
        "http://127.0.0.1:1/a.png",
        "http://[::1",
        "ftp://a/b",
        "file:///a.png",
        "data:,",
        "data:image/png;base64,AAAA",
        "data:image/png;base64,A",
        "",
    ):
        yield f"image at `{url}`", chat, _image(url)
    late = {"input": "a", "top_logprobs": 50, "include": ["message.output_text.logprobs"]}
    yield "`top_logprobs: 50`", responses, late
    yield "`top_logprobs: 50`, `stream: true`", responses, late | {"stream": True}
    yield (
        "`seed: 2**63 - 1`, `n: 2`",
        completion,
        {"prompt": "a", "seed": 2**63 - 1, "n": 2, "temperature": 1.0},
    )


def answer(server: Server, path: str, body: dict[str, Any]) -> str:
    """The status, the error's field and the beginning of what it says."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    try:
        response = server.post(path, {limit: 4, **body})
    except httpx.RemoteProtocolError:
        return "200, and the stream breaks off without an error"
    said = response.text
    if response.status_code == 200:
        return "200"
    if "application/json" in response.headers.get("content-type", ""):
        error = response.json().get("error")
        if isinstance(error, dict):
            said = f"`param: {json.dumps(error['param'])}`, {error['message']!r}"
    return f"{response.status_code}, {said[:120]}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = ordinary_model(Path(folder) / "model")
        limits = '{"image": 1, "video": 0, "audio": 0}'
        options = ("--load-format", "dummy", "--limit-mm-per-prompt", limits)
        plugins = {"VLLM_PLUGINS": "vllm_diffusion_cpu"}
        with start_server(model, Path(folder) / "log", *options, **plugins) as server:
            try:
                for name, path, body in requests():
                    print(f"| {name} | `{path}` | {answer(server, path, body)} |", flush=True)
                health = str(httpx.get(f"{server.url}/health", timeout=60).status_code)
            except httpx.TransportError as error:
                health = f"{type(error).__name__}, exit status {server.process.wait(60)}"
            print(f"then `/health`: {health}")


if __name__ == "__main__":
    main()
