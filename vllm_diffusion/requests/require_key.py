"""Requires the API key on paths that vLLM leaves open: always for adapters, on all paths with
:class:`RequireKey`.

vLLM's ``--api-key`` guards ``/v1`` and three other prefixes. ``docs/operate/security.md`` lists
what is outside.
"""

from collections.abc import Awaitable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_diffusion.hooks.replacement import replaces

# The files of the live canvas's page, which asks for the key itself and shows nothing of the
# server.
PAGE = "/diffusion/"
PAGE_FILES = (
    *("", "page.css", "page.js", "client.js", "grid.js", "markdown.js", "marked.js"),
    *("panel.js", "settings.js"),
)
# What load balancers and Prometheus ask, who have no key, and what asks for it.
_OPEN = ("/health", "/ping", "/metrics", *(PAGE + name for name in PAGE_FILES))


# SageMaker's names for loading and unloading an adapter, which vLLM adds to its own beneath /v1.
_ADAPTERS = "/adapters"


def guard_adapters() -> None:
    """Have vLLM ask for the key, if there is one, where adapters come and go. Safe to call
    twice.
    """
    _with_adapters.install()


@replaces(
    "vllm.entrypoints.serve.middleware.authenticate:GUARDED_PREFIX",
    reason="SageMaker's paths of adapters are added to the prefixes at which vLLM asks for the key.",
    until="vLLM guards /adapters, or takes the guarded prefixes as an option.",
)
def _with_adapters(stock: tuple[str, ...]) -> tuple[str, ...]:
    return (*stock, _ADAPTERS)


class RequireKey(AuthenticationMiddleware):
    """``vllm serve --middleware vllm_diffusion.requests.require_key.RequireKey``.

    The keys are those that vLLM itself asks for, of ``--api-key`` or ``VLLM_API_KEY``. Middleware
    is given no options, but wraps vLLM's own, which has them.
    """

    def __init__(self, app: Any) -> None:
        """Wrap vLLM's application.

        Raises:
            ValueError: If there is no key.
        """
        from vllm import envs

        inner = app
        while inner is not None and not isinstance(inner, AuthenticationMiddleware):
            # Middleware of somebody else's may keep what it wraps under another name.
            inner = getattr(inner, "app", None)
        if inner is None and not envs.VLLM_API_KEY:
            raise ValueError(
                "--middleware vllm_diffusion.requests.require_key.RequireKey needs a key; set the "
                "environment variable VLLM_API_KEY, or --api-key."
            )
        super().__init__(app, tokens=[envs.VLLM_API_KEY] if envs.VLLM_API_KEY else [])
        if inner is not None:
            self.api_tokens = inner.api_tokens

    def verify_token(self, headers: Any) -> bool:
        """Return true for a key as a bearer, or in the ``x-api-key`` that clients of Anthropic's
        API send.
        """
        as_bearer = Headers({"Authorization": f"Bearer {headers.get('x-api-key', '')}"})
        return super().verify_token(headers) or super().verify_token(as_bearer)

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Answer 401 where the key is missing; an ASGI application."""
        from starlette.responses import JSONResponse

        is_request = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if is_request and path not in _OPEN:
            headers = MutableHeaders(raw=list(scope["headers"]))
            if not self.verify_token(headers):
                response = JSONResponse(content={"error": "Unauthorized"}, status_code=401)
                return response(scope, receive, send)
            if not super().verify_token(headers):
                # vLLM's own middleware, which comes next, reads the bearer alone.
                headers["authorization"] = f"Bearer {headers['x-api-key']}"
                scope = {**scope, "headers": headers.raw}
        wrapped: Awaitable[None] = self.app(scope, receive, send)
        return wrapped
