"""Pictures of a refused request, which nobody may believe to be with the engine.

vLLM's renderer keeps a picture that it has prepared as one that the engine has, and sends the next
request with it without its pixels. A request may be refused after that: where the renderer cuts its
prompt, where its parameters are checked, where it is made the engine's.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

# Each renderer and prompt of the HTTP request that is served.
_prepared: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("prepared", default=None)


def note_prepared(renderer: Any, prompt: Any) -> None:
    """Note a prompt whose pictures were prepared for the HTTP request that is served, if any."""
    if (prepared := _prepared.get()) is not None:
        prepared.append((renderer, prompt))


async def serve_giving_back(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Serve an HTTP request by an ASGI application; its pictures are given back if it fails."""
    prepared: list[tuple[Any, Any]] = []
    token = _prepared.set(prepared)

    def give_all_back() -> None:
        for renderer, prompt in prepared:
            _give_back(renderer, prompt)

    async def watched(message: Any) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start and message["status"] >= HTTPStatus.BAD_REQUEST:
            give_all_back()
        await send(message)

    try:
        await app(scope, receive, watched)
    # Also where the client has left.
    except BaseException:
        give_all_back()
        raise
    finally:
        _prepared.reset(token)


@contextlib.contextmanager
def giving_pictures_back(renderer: Any, prompt: Any) -> Iterator[None]:
    """Give the pictures of a request back if it fails in the block.

    Args:
        renderer: vLLM's renderer, which keeps what was prepared.
        prompt: The request's prompt; rendered, it names its pictures.
    """
    try:
        yield
    except BaseException:
        _give_back(renderer, prompt)
        raise


def _give_back(renderer: Any, prompt: Any) -> None:
    hashes = prompt.get("mm_hashes", {}) if isinstance(prompt, Mapping) else {}
    renderer.queue_mm_cache_invalidations(
        [mm_hash for of_kind in hashes.values() for mm_hash in of_kind]
    )
