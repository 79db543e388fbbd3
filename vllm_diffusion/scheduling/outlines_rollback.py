"""Rollback of vLLM's outlines back end by as many tokens as a canvas has.

Its guides keep only the last few states, unless vLLM decodes speculatively: then they keep one for
each draft token. A canvas needs as many, but is not configured as a draft.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


class CanvasGrammars(StructuredOutputManager):
    """vLLM's manager of grammars, for canvases: outlines keeps a state for each token of a canvas."""

    def _create_grammar(self, request: Request) -> Any:
        # The manager makes its back end for the first request that needs one.
        if self.backend_name == "outlines":
            width = self.vllm_config.diffusion_config.canvas_length
            self.backend.vllm_config = SimpleNamespace(
                speculative_config=SimpleNamespace(num_speculative_tokens=width)
            )
        return super()._create_grammar(request)
