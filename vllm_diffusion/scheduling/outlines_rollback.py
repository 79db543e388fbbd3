"""Lets vLLM's outlines back end take back as many tokens as a canvas has.

Its guides forget all but the last few states, unless vLLM decodes speculatively: then they keep as
many as there are draft tokens, which a diffusion model's canvas is but is not configured as.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from vllm_diffusion.hooks.replacement import replace


def install() -> None:
    """Put our compilation in place of vLLM's, for diffusion models only. Safe to call twice."""
    from vllm.v1.structured_output.backend_outlines import OutlinesBackend

    replace(OutlinesBackend, "compile_grammar", _remembering)


def _remembering(stock: Any) -> Any:
    def compile_grammar(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock's compilation, told of the canvas as of draft tokens."""
        if not self.vllm_config.model_config.is_diffusion:
            return stock(self, *args, **kwargs)
        backend = copy.copy(self)
        width = self.vllm_config.diffusion_config.canvas_length
        backend.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=width)
        )
        return stock(backend, *args, **kwargs)

    return compile_grammar
