"""Refusal of LoRA adapters in the API process, before the engine loads them.

At the start, the adapters of ``--lora-modules`` are checked; while a server runs, requests for an
adapter whose files have changed since: a worker that cannot load it in the middle of a batch would end
the engine. :mod:`vllm_diffusion.weights.adapters.loading` checks what clients ask a server to load.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm_diffusion.hooks.replacement import replaces_call
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


@replaces_call(
    "vllm.entrypoints.common.cli_args:LoRAParserAction.__call__",
    reason="Notes the adapters of the command line, to check them before a start.",
    until="EngineArgs or VllmConfig hold --lora-modules.",
)
def _noting(
    stock: Any,
    self: Any,
    parser: Any,
    namespace: Any,
    values: Any,
    option_string: str | None = None,
) -> None:
    stock(self, parser, namespace, values, option_string)
    _named[:] = [(module.name, module.path) for module in getattr(namespace, self.dest)]


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
    """Check the adapter of a request, where a model has rules. Safe to call twice."""
    _checked_before_queueing.install()


@replaces_call(
    "vllm.v1.engine.input_processor:InputProcessor._validate_lora",
    reason="Refuses a request whose adapter could not be loaded again, which would end the engine.",
    until="A worker that cannot load an adapter refuses the request and not the batch.",
)
def _checked_before_queueing(stock: Any, self: Any, lora_request: Any) -> None:
    from vllm.exceptions import VLLMValidationError

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
