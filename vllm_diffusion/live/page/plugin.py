"""The page's routes, which vLLM adds to its server where ``VLLM_PLUGINS`` names the plugin."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Response

from vllm_diffusion.checkpoints import shipped_tasks
from vllm_diffusion.requests.arguments import (
    PREFIX,
    end_token_ids,
    offered_settings,
    with_end_texts,
)
from vllm_diffusion.requests.require_key import PAGE, PAGE_FILES
from vllm_diffusion.startup.plan import spec_of

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
        """Describe the served model.

        Returns:
            JSON: the ``model``'s served name, its ``architecture``, ``canvas_length`` (of a canvas
                that holds
            the whole sequence, the positions that are denoised at a time) and ``max_model_len`` in
            tokens, its ``end_tokens``; ``takes_pictures``, whether a message may hold one;
            ``tasks``, a sentence on what a shipped checkpoint can do, empty for other models;
            ``settings``, what a request may set in ``vllm_xargs``, as :func:`offered_settings`
            describes it; and ``presets``: settings that go together, by the preset's name.

        Raises:
            HTTPException: 404 if it is not a diffusion model, or not ours.
        """
        model_config = self._model_config
        spec = spec_of(model_config)
        if spec is None:
            raise HTTPException(
                404,
                f"{model_config.served_model_name} is not served by vllm-diffusion, so it has no canvas; "
                "see `vllm-diffusion doctor`.",
            )
        multimodal = model_config.multimodal_config
        return {
            "model": model_config.served_model_name,
            "architecture": model_config.architecture,
            "canvas_length": spec.block_length({}),
            "max_model_len": model_config.max_model_len,
            "end_tokens": self._end_tokens,
            "takes_pictures": multimodal is not None
            and multimodal.get_limit_per_prompt("image") > 0,
            "tasks": shipped_tasks(model_config.model),
            "settings": offered_settings(spec),
            "presets": {
                name: {PREFIX + setting: value for setting, value in values.items()}
                for name, values in spec.presets.items()
            },
        }


def _sender(name: str) -> Any:
    path = _FOLDER / name
    content, media_type = path.read_bytes(), _MEDIA_TYPES[path.suffix]

    async def send() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return send


def end_tokens_of(model_config: Any, tokenizer: Any) -> list[str]:
    """Spell the tokens that end an answer where its request names no others, as frames spell them.

    Args:
        model_config: vLLM's ``ModelConfig``.
        tokenizer: The served model's; ``None`` where vLLM was started without one.
    """
    from vllm import SamplingParams
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

    if tokenizer is None:
        return []
    params = SamplingParams()
    generation = with_end_texts(
        model_config.try_get_generation_config(), spec_of(model_config), tokenizer
    )
    params.update_from_generation_config(generation, tokenizer.eos_token_id)
    return list(convert_ids_list_to_tokens(tokenizer, end_token_ids(params)))
