"""Refusal of LoRA adapters in the API process, before the engine loads them.

At the start, the adapters of ``--lora-modules`` are checked; while a server runs, adapters that a
client asks it to load, and requests for one whose files have changed since: a worker that cannot
load it in the middle of a batch would end the engine.
"""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

from vllm_diffusion.hooks.replacement import replaces
from vllm_diffusion.weights.adapters.rules import AdapterRules

# Only vLLM's own commands import it.
_COMMAND = "vllm.entrypoints.common.cli_args"
# Name and path of each adapter on this process's command line.
_named: list[tuple[Any, Any]] = []


def note_command_line() -> None:
    """Record the adapters that vLLM's parser reads from ``--lora-modules``. This is safe to call twice.

    vLLM does not pass them on before the model is loaded.
    """
    if _COMMAND in sys.modules:
        _noting.install()


@replaces(
    "vllm.entrypoints.common.cli_args:LoRAParserAction.__call__",
    reason="Notes the adapters of the command line, to check them before a start.",
    until="EngineArgs or VllmConfig hold --lora-modules.",
)
def _noting(stock: Any) -> Any:
    def parse(
        self: Any, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        stock(self, parser, namespace, values, option_string)
        _named[:] = [(module.name, module.path) for module in getattr(namespace, self.dest)]

    return parse


def check_command_line(rules: AdapterRules) -> None:
    """Check the adapters of this process's command line, once.

    Raises:
        ValueError: Naming the option, what is wrong and what to do.
    """
    named = _named.copy()
    _named.clear()
    for name, path in named:
        if not isinstance(name, str) or not isinstance(path, str):
            raise ValueError(
                f"--lora-modules: name={name!r} and path={path!r} must both be strings; give name=path, or "
                'JSON like {"name": "poet", "path": "/adapters/poet"}.'
            )
        try:
            rules.check(path)
        except ValueError as error:
            raise ValueError(f"--lora-modules {name}={path}: {error}") from None


def install() -> None:
    """Put our checks in front of vLLM's, where a model has rules. Safe to call twice."""
    _checked_before_loading.install()
    _checked_before_queueing.install()


@replaces(
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels._check_load_lora_adapter_request",
    reason="Refuses an adapter that does not fit before an engine is asked, which it would end.",
    until="A LoRAResolver is asked about adapters that a client loads by path too.",
)
def _checked_before_loading(stock: Any) -> Any:
    from vllm.entrypoints.serve import create_error_response

    async def check(self: Any, request: Any) -> Any:
        refusal = await stock(self, request)
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

    return check


@replaces(
    "vllm.v1.engine.input_processor:InputProcessor._validate_lora",
    reason="Refuses a request whose adapter could not be loaded again, which would end the engine.",
    until="A worker that cannot load an adapter refuses the request and not the batch.",
)
def _checked_before_queueing(stock: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    def validate_lora(self: Any, lora_request: Any) -> None:
        stock(self, lora_request)
        rules: AdapterRules | None = getattr(self.model_config, "adapter_rules", None)
        if lora_request is None or rules is None:
            return
        try:
            rules.check(lora_request.lora_path)
        except ValueError as error:
            raise VLLMValidationError(
                f"model {lora_request.lora_name!r}: {error}",
                parameter="model",
                value=lora_request.lora_name,
            ) from None

    return validate_lora
