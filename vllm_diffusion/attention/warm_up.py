"""Has vLLM's start-up compile every variant of our kernels that serving may launch.

Which one a pass takes depends on how many rows it has and on whether an image is among them, and
compiling one takes seconds: none is left to a request.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

from vllm_diffusion.decoding.layouts import span_variants
from vllm_diffusion.startup.plan import plan_of


class AttentionVariants(VllmJitKernel[Any]):
    """Among the kernels that vLLM compiles before it captures graphs; one layer of each kind
    asks.
    """

    def get_warmup_keys(self, layer_names: list[str], vllm_config: VllmConfig) -> list[Any]:
        """Layers whose launches differ; layers of a kind are one key, whatever their group."""
        layers = vllm_config.compilation_config.static_forward_context
        return [_Layer(layers[name].impl.kind, layers[name], vllm_config) for name in layer_names]

    def compile(self, compile_key: Any) -> None:
        """Launch each variant on a sequence without rows."""
        layer, config = compile_key.layer, compile_key.config
        plan = plan_of(config)
        has_images = config.model_config.is_mm_prefix_lm
        spans = span_variants(plan.spec is not None and plan.spec.layout.has_spans, has_images)
        # vLLM's own classes have one flag a sequence, and a window that follows the row.
        anchor = "query" if plan.spec is None else plan.settings.window_anchor
        layer.impl.warm_up(layer, anchor, spans, config.model_config.dtype)


@dataclass(frozen=True)
class _Layer:
    """A layer, equal to every other one of its kind."""

    kind: Any
    layer: Any = field(compare=False)
    config: VllmConfig = field(compare=False)


ATTENTION_VARIANTS = AttentionVariants()
