"""Rollback of vLLM's outlines back end by as many tokens as a canvas has.

Its guides keep only the last few states, unless vLLM decodes speculatively: then they keep one for
each draft token. A canvas needs as many, but is not configured as a draft.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from vllm_diffusion.hooks.replacement import replace


def install() -> None:
    """Replace vLLM's compilation for diffusion models only. This is safe to call twice."""
    from vllm.v1.structured_output.backend_outlines import OutlinesBackend

    replace(OutlinesBackend, "compile_grammar", _remembering)


def _remembering(stock: Any) -> Any:
    def compile_grammar(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Compile as vLLM does, with the canvas length as the number of draft tokens."""
        if not self.vllm_config.model_config.is_diffusion:
            return stock(self, *args, **kwargs)
        backend = copy.copy(self)
        width = self.vllm_config.diffusion_config.canvas_length
        backend.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=width)
        )
        return stock(backend, *args, **kwargs)

    return compile_grammar
