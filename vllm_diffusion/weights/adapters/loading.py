"""Refusal of LoRA adapters that a client asks a running server to load."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response

from vllm_diffusion.weights.adapters.rules import AdapterRules


class CheckedModels(OpenAIServingModels):
    """Models and adapters of a server, which refuses an adapter that would end its engine."""

    async def _check_load_lora_adapter_request(self, request: Any) -> Any:
        refusal = await super()._check_load_lora_adapter_request(request)
        rules: AdapterRules | None = getattr(self.model_config, "adapter_rules", None)
        if refusal is not None or rules is None:
            return refusal
        at_start = {lora.name for lora in self.static_lora_modules or ()}
        num_servers = self.engine_client.vllm_config.parallel_config._api_process_count
        problem = None
        if num_servers > 1 and request.lora_name not in at_start:
            problem = (
                "cannot be loaded by one of several API servers, since the others would not know it; "
                "name it in --lora-modules, or start with --api-server-count 1."
            )
        else:
            try:
                # A repository may have to be fetched.
                await asyncio.to_thread(rules.check_loading, request.lora_name, request.lora_path)
            except ValueError as error:
                problem = str(error)
        if problem is None:
            return None
        return create_error_response(
            message=f"lora_path {problem}",
            err_type="BadRequestError",
            status_code=HTTPStatus.BAD_REQUEST,
            param="lora_path",
        )


# By name in the state of vLLM's server.
ENDPOINTS: dict[str, type] = {"openai_serving_models": CheckedModels}
