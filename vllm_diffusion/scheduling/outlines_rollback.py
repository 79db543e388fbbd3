"""Rollback of vLLM's outlines back end by as many tokens as a canvas has.

Its guides keep only the last few states, unless vLLM decodes speculatively: then they keep one for
each draft token. A canvas needs as many, but is not configured as a draft.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from vllm_diffusion.hooks.replacement import replaces


def install() -> None:
    """Put our compilation in place of vLLM's, for diffusion models only. Safe to call twice."""
    _remembering.install()


@replaces(
    "vllm.v1.structured_output.backend_outlines:OutlinesBackend.compile_grammar",
    reason="Its guides forget all but four states; a canvas is walked back further.",
    until="The back end takes how far a request may be walked back from diffusion_config too.",
)
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
