"""One address for a server that prefills and one that denoises: each request goes to both, in turn.

python examples/disaggregated/proxy.py --prefill http://127.0.0.1:8100 --denoise http://127.0.0.1:8200 --port 8000

Both are started as docs/operate/disaggregation.md says, and asked with the key that the client brings. What the
prefilling server cannot do, it being away included, the denoising one does alone.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

logger = logging.getLogger("uvicorn.error")

# Of a request: what says nothing of its prompt.
_OF_THE_ANSWER = (
    *("stream", "stream_options", "diffusing", "vllm_xargs", "stop", "min_tokens", "ignore_eos"),
    *("logprobs", "top_logprobs", "response_format", "structured_outputs", "max_completion_tokens"),
)
# Not the next connection's business.
_OF_A_CONNECTION = ("host", "content-length", "connection", "transfer-encoding", "accept-encoding")


def proxy(prefill: str, denoise: str) -> Starlette:
    """The application; both arguments are addresses of servers, without a path."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # A request may wait for as long as its server makes it.
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5)) as app.state.client:
            yield

    async def answer(request: Request) -> StreamingResponse:
        try:
            body = await request.json()
        except ValueError:
            # The denoising server says what is wrong with it.
            return await forward(request)
        if _is_one_prompt(body):
            body["kv_transfer_params"] = await prefilled(request, body)
        return await forward(request, body)

    async def prefilled(request: Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """How the denoising server gets the prompt's keys and values; ``None`` if it does not."""
        asked = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
        asked |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        if "tools" in asked:
            # They are part of the prompt; nothing is called yet.
            asked["tool_choice"] = "none"
        try:
            response = await request.app.state.client.post(
                prefill + request.url.path, json=asked, headers=_headers(request)
            )
            response.raise_for_status()
            return response.json()["kv_transfer_params"]
        except httpx.HTTPError as error:
            logger.warning("not prefilled by %s: %s", prefill, str(error) or type(error).__name__)
            return None

    async def forward(request: Request, body: dict[str, Any] | None = None) -> StreamingResponse:
        """The denoising server's response, as it comes."""
        client: httpx.AsyncClient = request.app.state.client
        sent = client.build_request(
            request.method,
            denoise + request.url.path,
            params=request.query_params,
            headers=_headers(request),
            content=await request.body() if body is None else None,
            json=body,
        )
        response = await client.send(sent, stream=True)
        return StreamingResponse(
            response.aiter_raw(),
            response.status_code,
            _headers(response),
            background=BackgroundTask(response.aclose),
        )

    routes = [
        Route("/v1/completions", answer, methods=["POST"]),
        Route("/v1/chat/completions", answer, methods=["POST"]),
        Route("/{path:path}", forward, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _is_one_prompt(body: Any) -> bool:
    """Whether the request is of one prompt and one answer, as ``kv_transfer_params`` are."""
    if not isinstance(body, dict) or body.get("n", 1) not in (1, None):
        return False
    # What is read of the prompt's own rows needs them computed where it is answered.
    if body.get("echo") or body.get("prompt_logprobs") is not None:
        return False
    prompt = body.get("prompt", "")
    return not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)


def _headers(message: Request | httpx.Response) -> dict[str, str]:
    return {name: value for name, value in message.headers.items() if name not in _OF_A_CONNECTION}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", required=True, help="address of the prefilling server")
    parser.add_argument("--denoise", required=True, help="address of the denoising server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    app = proxy(chosen.prefill.rstrip("/"), chosen.denoise.rstrip("/"))
    uvicorn.run(app, host=chosen.host, port=chosen.port)


if __name__ == "__main__":
    main()
