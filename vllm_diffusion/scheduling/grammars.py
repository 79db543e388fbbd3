"""vLLM's manager of grammars, for canvases and for the autoregressive mode."""

from __future__ import annotations

import copy
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.requests.arguments import end_token_ids
from vllm_diffusion.startup.engine_config import AUTOREGRESSIVE


def install() -> None:
    """Put our rule for thoughts in place of vLLM's, for our autoregressive mode only. Safe to call twice."""
    _without_ends.install()


@replaces_call(
    "vllm.v1.structured_output:StructuredOutputManager._masked_reasoning_ends",
    reason="With vLLM's own sampler an answer may end within a thought, before its grammar has begun.",
    until="vLLM masks the tokens that end a request while it reasons, where its grammar rejects them.",
)
def _without_ends(stock: Any, self: Any, request: Request) -> tuple[int, ...]:
    """Return the tokens that a thought may not have, in the autoregressive mode also those that end an answer.

    A grammar that accepts an end as its first token is satisfied by it.
    """
    masked: tuple[int, ...] = stock(self, request)
    plan = getattr(self.vllm_config.model_config, "diffusion", None)
    if plan is None or plan.settings.rule != AUTOREGRESSIVE:
        return masked
    assert request.structured_output_request is not None
    grammar: Any = request.structured_output_request.grammar
    ends = end_token_ids(request.sampling_params)
    return (*masked, *(end for end in ends if not grammar.validate_tokens([end])))


class CanvasGrammars(StructuredOutputManager):
    """vLLM's manager of grammars, for canvases: each request has the back end that its check chose.

    Stock has one back end, that of the first request, and refuses every request that needs another.
    """

    # One manager for each back end, made by `of`; they share the tokenizer and the threads.
    _managers: dict[str, StructuredOutputManager]

    @classmethod
    def of(cls, manager: StructuredOutputManager) -> None:
        """Make ``manager``, which the engine holds and has not used yet, one of this class."""
        manager.__class__ = cls
        manager._managers = {}

    def grammar_init(self, request: Request) -> None:
        name = _back_end_name(request)
        if name is None:
            return
        if name not in self._managers:
            self._managers[name] = copy.copy(self)
        StructuredOutputManager.grammar_init(self._managers[name], request)

    def back_end_of(self, request: Request) -> Any:
        """Return the back end of a request that has a grammar."""
        return self._managers[str(_back_end_name(request))].backend

    def clear_backend(self) -> None:
        """Release all back ends: each manager waits for the threads, which end once."""
        for manager in self._managers.values():
            StructuredOutputManager.clear_backend(manager)
        super().clear_backend()


def _back_end_name(request: Request) -> str | None:
    params = request.sampling_params
    constraint = None if params is None else params.structured_outputs
    return None if constraint is None else constraint._backend


logger = init_logger(f"vllm.{__name__}")
