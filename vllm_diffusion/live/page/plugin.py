"""The page's routes, which vLLM adds to its server where ``VLLM_PLUGINS`` names the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Response

from vllm_diffusion.live.page.description import describe, end_tokens_of
from vllm_diffusion.requests.require_key import PAGE, PAGE_FILES

# Beneath /v1, where vLLM asks for the key.
MODEL_PATH = "/v1/diffusion/model"
_FOLDER = Path(__file__).with_name("static")
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# Nothing comes from elsewhere or goes there, and nothing that a model writes is ever run.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # After an upgrade all of its files are new.
    "Cache-Control": "no-cache",
}


class LiveCanvasPage:
    """A plugin of vLLM's group ``vllm.endpoint_plugins``.

    Attributes:
        name: Name in ``VLLM_PLUGINS``.
        required_tasks: Tasks of which the server must have one.
    """

    name = "vllm_diffusion_page"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the page at ``/diffusion/``, and the endpoint from which it learns of the model."""
        for name in PAGE_FILES:
            app.add_api_route(PAGE + name, _sender(name or "page.html"), include_in_schema=False)
        app.add_api_route(MODEL_PATH, self.model, summary="What a diffusion model may be set to")

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Learn which model is served."""
        self._model_config = engine_client.vllm_config.model_config
        tokenizer = engine_client.renderer.tokenizer
        self._end_tokens = end_tokens_of(self._model_config, tokenizer)

    async def model(self) -> dict[str, Any]:
        """Describe the served model, as :func:`describe` does.

        Raises:
            HTTPException: 404 if it is not a diffusion model, or not ours.
        """
        try:
            return describe(self._model_config, self._end_tokens)
        except ValueError as error:
            raise HTTPException(404, str(error)) from None


def _sender(name: str) -> Any:
    path = _FOLDER / name
    content, media_type = path.read_bytes(), _MEDIA_TYPES[path.suffix]

    async def send() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return send
