"""One address for a server that prefills and one that denoises: each request goes to both, in turn.

python examples/disaggregated/proxy.py --prefill http://127.0.0.1:8100 --denoise http://127.0.0.1:8200 --port 8000

Both are started as docs/operate/disaggregation.md says, and asked with the key that the client brings. What the
prefilling server cannot do, it being away included, the denoising one does alone.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

# Of a request: what says nothing of its prompt.
OF_THE_ANSWER = (
    *("stream", "stream_options", "diffusing", "vllm_xargs", "stop", "min_tokens", "ignore_eos"),
    *("logprobs", "top_logprobs", "response_format", "structured_outputs", "max_completion_tokens"),
)
# Not the next connection's business.
OF_A_CONNECTION = ("host", "content-length", "connection", "transfer-encoding", "accept-encoding")


def is_one_prompt(body: Any) -> bool:
    """Whether the request is of one prompt and one answer, as ``kv_transfer_params`` are."""
    if not isinstance(body, dict) or body.get("n", 1) not in (1, None):
        return False
    prompt = body.get("prompt", "")
    is_batch = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    # What is read of the prompt's own rows needs them computed where it is answered.
    return not (is_batch or body.get("echo") or body.get("prompt_logprobs") is not None)


def headers_of(message: Request | httpx.Response) -> dict[str, str]:
    return {name: value for name, value in message.headers.items() if name not in OF_A_CONNECTION}


def proxy(prefill: str, denoise: str) -> Starlette:
    """The application; both arguments are addresses of servers, without a path."""
    # A request may wait for as long as its server makes it.
    client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5))

    @asynccontextmanager
    async def closing_client(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    async def prefilled(request: Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """How the denoising server gets the prompt's keys and values; ``None`` if it does not."""
        asked = {name: value for name, value in body.items() if name not in OF_THE_ANSWER}
        asked |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        if "tools" in asked:
            # They are part of the prompt; nothing is called yet.
            asked["tool_choice"] = "none"
        url, headers = prefill + request.url.path, headers_of(request)
        try:
            response = await client.post(url, json=asked, headers=headers)
            return response.raise_for_status().json()["kv_transfer_params"]
        except (httpx.HTTPError, ValueError) as error:
            logging.getLogger("uvicorn.error").warning("not prefilled by %s: %r", prefill, error)
            return None

    async def answer(request: Request) -> StreamingResponse:
        """The denoising server's response, as it comes."""
        content = await request.body()
        if request.url.path in ("/v1/completions", "/v1/chat/completions"):
            # What is no JSON is for the denoising server to refuse.
            with suppress(ValueError):
                if is_one_prompt(body := json.loads(content)):
                    body["kv_transfer_params"] = await prefilled(request, body)
                    content = json.dumps(body).encode()
        url, headers = denoise + request.url.path, headers_of(request)
        sent = client.build_request(
            request.method, url, params=request.query_params, headers=headers, content=content
        )
        response = await client.send(sent, stream=True)
        closing = BackgroundTask(response.aclose)
        return StreamingResponse(
            response.aiter_raw(), response.status_code, headers_of(response), background=closing
        )

    routes = [Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "DELETE"])]
    return Starlette(routes=routes, lifespan=closing_client)


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
