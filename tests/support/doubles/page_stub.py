"""The page of the live canvas with a server without an engine that answers as it is told."""

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from vllm.config import MultiModalConfig
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from tests.support.models.specs import diffusion_gemma_spec
from vllm_diffusion.live.page.plugin import LiveCanvasPage
from vllm_diffusion.startup.plan import DiffusionPlan

KEY = "the key of the stub"
CANVAS_LENGTH, STEPS = 32, 6
WAYS = ("entropy_bound", "linear_spec", "autoregressive")
MARKDOWN = """\
## Seasons
1. *spring*,
   - `tulip`
2. **autumn** &
   wind

| month | days |
|---|---|
| May | 31 |

```
<b>code</b>
```
[a link](http://127.0.0.1/elsewhere) ![a picture](http://127.0.0.1/p.png) <i>slanted</i>"""
# What a model may write to run something in whoever reads it.
HOSTILE = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "</span><svg/onload=window.ran=1>",
    "javascript:window.ran=1",
)
# How an answer without text ends, by the message that asks for it: finish reason, its cause,
# tokens.
EMPTY = {
    "end at once": ("stop", 1, 1),
    "say nothing": ("stop", 1, 3),
    "be cut": ("length", None, 1),
    "be stuck": ("length", "the grammar allows no token", 2),
    "repeat": ("repetition", None, 8),
    "think": ("stop", 1, 5),
}


def engine_client(spec: Any, **model: Any) -> Any:
    """An engine's client, as far as the page asks it.

    Args:
        spec: Of the canvases; ``None`` for a model without.
        model: Fields of the model's configuration.
    """
    model_config = SimpleNamespace(
        try_get_generation_config=lambda: {"eos_token_id": [1, 2]},
        **{"multimodal_config": None, **model},
    )
    if spec is not None:
        model_config.diffusion = DiffusionPlan(spec=spec)
    names = {0: "<pad>", 1: "<eos>", 2: "<turn|>"}
    tokenizer = SimpleNamespace(
        eos_token_id=1,
        decode=lambda ids: names[ids[0]],
        # Of another text a token for each character.
        encode=lambda text, **_: [i for i in names if names[i] == text] or [3] * len(text),
    )
    return SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model_config),
        renderer=SimpleNamespace(tokenizer=tokenizer),
    )


def stub_app(asked: list[dict[str, Any]], key: str | None, name: str) -> FastAPI:
    """A server with the page.

    Args:
        asked: Where the bodies of requests are noted.
        key: What it asks of its clients.
        name: Of the served model, or its folder, whose name is then the model's.
    """
    page = LiveCanvasPage()
    spec = diffusion_gemma_spec(CANVAS_LENGTH, 16)
    engine = engine_client(
        replace(spec, ways=tuple(replace(spec.ways[0], name=name) for name in WAYS)),
        served_model_name=name.rpartition("/")[2],
        model=name,
        architecture="DiffusionGemmaForBlockDiffusion",
        max_model_len=1024,
        multimodal_config=MultiModalConfig(limit_per_prompt={"image": 1}),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await page.init_state(engine, app.state, None)
        yield

    app = FastAPI(lifespan=lifespan)
    page.attach_router(app)

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Any:
        asked.append(body)
        prompt = body["messages"][-1]["content"]
        if isinstance(prompt, list):
            prompt = prompt[-1]["text"]
        if prompt == "refuse":
            return JSONResponse({"error": {"message": "seed must be <b>small</b>."}}, 400)
        if prompt == "another model":
            return JSONResponse({"error": {"message": "The model `stub` does not exist."}}, 404)
        if "diffusion_frames" not in body["vllm_xargs"]:
            events = _without_canvases()
        else:
            events = _empty_answer(prompt) if prompt in EMPTY else _events(prompt)
        return StreamingResponse(events, media_type="text/event-stream")

    if key is not None:
        app.add_middleware(AuthenticationMiddleware, tokens=[key])
    return app


async def _empty_answer(prompt: str) -> AsyncIterator[str]:
    reason, cause, num_tokens = EMPTY[prompt]
    delta = {"reasoning": "Hm."} if prompt == "think" else {"content": ""}
    yield _event(
        _frame(0, STEPS, ["<eos>"] * CANVAS_LENGTH, 0) | {"reasoning": delta.get("reasoning")}
    )
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "stop_reason": cause}
    yield _event({"choices": [choice]})
    yield _event({"choices": [], "usage": {"completion_tokens": num_tokens}})
    yield "data: [DONE]\n\n"


async def _without_canvases() -> AsyncIterator[str]:
    for text in ("Token ", "by ", "token."):
        yield _event({"choices": [{"index": 0, "delta": {"content": text}}]})
    yield "data: [DONE]\n\n"


async def _events(prompt: str) -> AsyncIterator[str]:
    texts = ["Canvases ", "of ", "this ", "server ", "say ", "what ", "they ", "are ", "told."]
    if prompt == "hostile":
        texts = list(HOSTILE)
    if prompt == "markdown":
        texts = re.findall(r"\s*\S+\s?", MARKDOWN)
    if prompt == "cold":
        await asyncio.sleep(1.5)
    for block, chunk in enumerate((texts, ["\n", "The end."])):
        tokens = chunk + ["<eos>"] * (CANVAS_LENGTH - len(chunk))
        committed = _event({"choices": [{"index": 0, "delta": {"content": "".join(chunk)}}]})
        if prompt == "early":
            yield committed
        for step in range(1, STEPS + 1):
            total = 4 if prompt == "past the cap" else 16
            yield _event(_frame(block, step, tokens, len(chunk), total))
            await asyncio.sleep(0.02 if prompt != "slowly" else 0.3)
            if prompt == "die" and block and step == STEPS // 2:
                # A browser forgets what it has not read yet when a connection breaks off.
                await asyncio.sleep(0.5)
                raise ConnectionAbortedError("as it was told")
            if prompt == "give up" and block:
                yield _event({"error": {"message": "The engine died."}})
                return
        yield _event(
            {
                "type": "diffusion_step_map",
                "block": block,
                "steps": [_decided(i) for i in range(len(chunk))],
                "choices": [],
            }
        )
        if prompt != "early":
            yield committed
    yield _event({"choices": [], "usage": {"completion_tokens": len(texts) + 2}})
    yield "data: [DONE]\n\n"


def _decided(position: int) -> int:
    return min(1 + position % STEPS, STEPS)


def _frame(
    block: int, step: int, tokens: list[str], num_shown: int, total: int = 16
) -> dict[str, Any]:
    def is_kept(position: int) -> bool:
        return step == STEPS or _decided(position) < step

    shown = [t if is_kept(i) or i % 3 else "noise " for i, t in enumerate(tokens)]
    return {
        "type": "diffusion_frame",
        "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}],
        "block": block,
        "step": step,
        "total": total,
        "text": "".join(shown[:num_shown]),
        "is_last": step == STEPS,
        "begins_anew": False,
        "tokens": shown,
        "kept": [is_kept(i) for i in range(len(tokens))],
        "entropy": [
            round(0.01 if is_kept(i) else 4 * math.exp(-step / 3) * (1 + i % 4) / 4, 4)
            for i in range(len(tokens))
        ],
    }


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


class Stub:
    """A running stub.

    Attributes:
        url: Of the page.
        asked: Bodies of the requests that it got.
    """

    def __init__(self, key: str | None, name: str) -> None:
        self.asked: list[dict[str, Any]] = []
        config = uvicorn.Config(stub_app(self.asked, key, name), port=0, log_level="critical")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline, "the stub did not start"
            time.sleep(0.02)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/diffusion/"

    def stop(self) -> None:
        """Stop the server, even while it answers."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()


@contextmanager
def running_stub(key: str | None = KEY, name: str = "stub") -> Iterator[Stub]:
    """Run a stub on a free port, which requires a key or none."""
    stub = Stub(key, name)
    try:
        yield stub
    finally:
        stub.stop()
