"""A middleware of ``vllm serve`` by which a test has a thread of the engine raise."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

PATH = "/raise_in/"


async def raise_in_thread(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Answer ``/raise_in/input`` and ``/raise_in/output``, and leave other paths to the server."""
    from vllm.v1.engine import EngineCoreRequestType

    if not request.url.path.startswith(PATH):
        return await call_next(request)
    client = request.app.state.engine_client
    if request.url.path.endswith("input"):
        # No request that the engine could decode.
        await client.engine_core._send_input(EngineCoreRequestType.ADD, ("text",))
    else:
        # A model is nothing that the engine could encode. Its answer never comes.
        asyncio.ensure_future(client.collective_rpc("get_model"))
    return Response()
