"""vLLM's attention interface on top of :mod:`attention_kernels.canvas_attention`.

One back end for every layer and every mixture of prefill, denoise and encode rows.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    MultipleOf,
)

from attention_kernels.canvas_attention import (
    MAX_SPLITS,
    AttentionOptions,
    Impl,
    PagedCache,
    Planned,
    Window,
    WindowAnchor,
    plan_canvas_attention,
    warm_up_canvas_attention,
)
from vllm_diffusion.attention.cache_writes import FP8, cache_writer, split_kv_cache
from vllm_diffusion.attention.metadata import (
    CanvasAttentionMetadata,
    CanvasAttentionMetadataBuilder,
)
from vllm_diffusion.startup.plan import plan_of, spec_of

logger = init_logger(f"vllm.{__name__}")

FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3")


@dataclass(frozen=True)
class LayerKind:
    """Kind of attention layers, which run the same kernels.

    Attributes:
        num_heads: Query heads of a rank.
        num_kv_heads: Key and value heads of a rank.
        head_dim: Head size.
        window: Keys next to a row that a sliding window holds; -1 without one.
        cache_dtype: vLLM's ``kv_cache_dtype`` of the layers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    cache_dtype: str

    @property
    def name(self) -> str:
        """Name for a reader."""
        window = "full" if self.window < 0 else f"window {self.window}"
        cache = "" if self.cache_dtype == "auto" else f", {self.cache_dtype} cache"
        heads = f"{self.num_heads} heads on {self.num_kv_heads} of {self.head_dim}"
        return f"{heads}, {window}{cache}"


class CanvasAttentionImpl(AttentionImpl[CanvasAttentionMetadata]):
    """One layer's attention over the paged cache."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        for name, value in (("ALiBi", alibi_slopes), ("attention sinks", sinks)):
            if value is not None:
                raise ValueError(
                    f"The attention back end of vllm-diffusion does not support {name}."
                )
        if kv_cache_dtype not in CanvasAttentionBackend.supported_kv_cache_dtypes:
            raise ValueError(
                f"kv_cache_dtype={kv_cache_dtype} is not supported by the attention back end of "
                f"vllm-diffusion; use one of {CanvasAttentionBackend.supported_kv_cache_dtypes}."
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # A model's sliding window counts the query itself; ours count the keys next to it.
        self.window = -1 if sliding_window is None else sliding_window - 1
        self.is_fp8 = kv_cache_dtype in FP8_CACHE_DTYPES
        config = get_current_vllm_config()
        self.write_cache = cache_writer(self.is_fp8)
        layer_kind = LayerKind(num_heads, self.num_kv_heads, head_size, self.window, kv_cache_dtype)
        self.impl: Impl = plan_of(config).settings.attention
        spec = spec_of(config.model_config)
        self.canvas_length = 0 if spec is None else spec.length
        # vLLM's Gemma 4 takes the spans from the metadata of its own back ends where layers have no
        # window. DiffusionGemma's encoder, a Gemma 4 otherwise, sees a whole picture in every
        # layer.
        text_config = getattr(config.model_config, "hf_text_config", None)
        bidirectional = getattr(text_config, "use_bidirectional_attention", None)
        is_encoder = getattr(text_config, "model_type", None) == "diffusion_gemma_text"
        self.sees_images_in_window = bidirectional == "vision" and not is_encoder
        if self.impl == "cute":
            self._run_triton_where_cute_cannot(config.model_config.is_mm_prefix_lm)
        # Layers that agree in these share what they launch.
        self.kind = (layer_kind, self.scale, self.softcap)

    def _run_triton_where_cute_cannot(self, may_hold_images: bool) -> None:
        """One kind of layer may have no kernel of FlashAttention-4 where the other has."""
        from attention_kernels.canvas_attention.cute.launch import refusal

        capability = current_platform.get_device_capability()
        reason = None if capability is None else refusal(tuple(capability), self.head_size)
        if self.is_fp8:
            reason = "reads no FP8 cache."
        if reason is not None:
            logger.info_once(
                "Layers of head size %d run Triton: FlashAttention-4 %s", self.head_size, reason
            )
            self.impl = "triton"
        elif may_hold_images:
            logger.info_once(
                "Passes with an image run Triton in layers of head size %d: FlashAttention-4 knows "
                "no image spans.",
                self.head_size,
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CanvasAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "the attention back end of vllm-diffusion does not quantise its output"
            )
        if attn_metadata is None:
            # The engine's memory profile runs without a cache.
            return output.fill_(0)
        plan = attn_metadata.plans.get(self.kind)
        cache = self._cache(layer, kv_cache)
        out = output.view(-1, self.num_heads, self.head_size)
        if plan is None:
            plan = self._plan(attn_metadata, query, cache, out)
        plan(query, cache, out)
        return output

    def _plan(
        self,
        attn_metadata: CanvasAttentionMetadata,
        query: Tensor,
        cache: PagedCache,
        out: Tensor,
    ) -> Planned:
        """Check the step for layers of this kind, of which this is the first."""
        num_tokens, sequences = attn_metadata.num_tokens, attn_metadata.sequences
        if self.sees_images_in_window:
            sequences = replace(sequences, row_spans=attn_metadata.spans_within(self.window))
        plan = plan_canvas_attention(
            query[:num_tokens],
            cache,
            sequences,
            self._options(attn_metadata.window_anchor),
            out=out[:num_tokens],
            impl=self._impl_for(sequences.row_spans is not None),
        )
        attn_metadata.plans[self.kind] = plan
        return plan

    def _options(self, window_anchor: WindowAnchor) -> AttentionOptions:
        """Return the options of layers of this kind in steps with a window anchor."""
        right = self.window if window_anchor == "query" else -1
        window = Window(self.window, right, window_anchor)
        most_splits = 1 if envs.VLLM_BATCH_INVARIANT else MAX_SPLITS
        return AttentionOptions(self.scale, self.softcap, window, most_splits)

    def _cache(self, layer: AttentionLayer, kv_cache: Tensor) -> PagedCache:
        """Return the layer's keys and values; an FP8 cache has scales."""
        key, value = self._split(kv_cache)
        if not self.is_fp8:
            return PagedCache(key, value)
        return PagedCache(key, value, layer._k_scale, layer._v_scale)

    def warm_up(
        self, layer: Any, window_anchor: WindowAnchor, with_spans: list[bool], dtype: torch.dtype
    ) -> None:
        """Compile the kernels for all steps that layers of this kind may run.

        Args:
            layer: Layer of the kind, with its cache.
            window_anchor: Window anchor of the steps.
            with_spans: True for steps with image spans, false for steps without; both if both
                occur.
            dtype: Type of queries.
        """
        wanted: dict[Impl, set[bool]] = {}
        for has_spans in with_spans:
            wanted.setdefault(self._impl_for(has_spans), set()).add(has_spans)
        cache = self._cache(layer, layer.kv_cache)
        query_shape = (1, self.num_heads, self.head_size)
        for impl, spans in wanted.items():
            warm_up_canvas_attention(
                torch.empty(query_shape, dtype=dtype, device=cache.key.device),
                cache,
                self._options(window_anchor),
                with_spans=sorted(spans),
                impl=impl,
            )

    def _impl_for(self, has_spans: bool) -> Impl:
        """FlashAttention-4 does not support image spans."""
        return "triton" if self.impl == "cute" and has_spans else self.impl

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write this step's keys and values; a slot of -1 is padding and is not written."""
        self.write_cache(
            key,
            value,
            *self._split(kv_cache),
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_fp8:
            # vLLM allocates bytes.
            kv_cache = kv_cache.view(FP8)
        return split_kv_cache(kv_cache)


class CanvasAttentionBackend(AttentionBackend):
    """Attention for batches whose sequences are causal at the head and bidirectional at the
    tail.
    """

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "bfloat16",
        "float16",
        *FP8_CACHE_DTYPES,
    ]

    @staticmethod
    def get_name() -> str:
        # vLLM resolves the name through its registry of back ends, whose slot for out-of-tree
        # back ends is CUSTOM.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CanvasAttentionImpl]:
        return CanvasAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CanvasAttentionMetadataBuilder]:
        return CanvasAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        # Keys stay uncut with it, so that a row's sum does not depend on the batch.
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True
