"""The routes of a server that runs, and which of them answer without its key."""

import re
from typing import Any

import httpx

from tests.support.engines.server import Server

_PATH = "/routes-of-this-server"
MIDDLEWARE = ("--middleware", f"{__name__}.ListRoutes")


class ListRoutes:
    """Middleware of a server that lists every path of its application."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != _PATH:
            await self.app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

        paths = sorted({route.path for route in scope["app"].routes})
        await JSONResponse(paths)(scope, receive, send)


def open_paths(server: Server) -> set[str]:
    """Return the paths that are not refused without a key.

    Requests have a method that none of them supports, so that nothing is done.
    """
    found = set()
    for path in httpx.get(f"{server.url}{_PATH}", timeout=60).json():
        answer = httpx.request("TRACE", server.url + re.sub(r"{.*?}", "x", path), timeout=60)
        assert answer.status_code != 200 or path == "/metrics", path
        if answer.status_code != 401:
            found.add(path)
    return found
