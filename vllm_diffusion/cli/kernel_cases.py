"""Cases that check the kernels of a configuration, each on small inputs of the served shapes.

The process that runs the cases imports this file, and needs nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from attention_kernels.checks import AttentionShape, RowsShape
from vllm_diffusion.decoding.layouts import span_variants

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from attention_kernels.canvas_attention import Impl
    from vllm_diffusion.attention.backend import LayerKind
    from vllm_diffusion.startup.plan import DiffusionPlan

Kernel = Literal["device", "noise", "attention", "statistics", "kept rows"]
# Rows of small inputs, and ids of a tile. The sampler's is a multiple: Triton compiles the same for
# both.
MAX_ROWS, TILE = 64, 8192


@dataclass(frozen=True)
class KernelCase:
    """One implementation of one kernel, with its inputs.

    Attributes:
        kernel: Which check.
        subject: Layers, or empty.
        impl: Implementation that is checked.
        shapes: Inputs, one after another; the last is timed.
    """

    kernel: Kernel
    subject: str
    impl: str
    shapes: tuple[AttentionShape | RowsShape, ...] = ()

    @property
    def name(self) -> str:
        """Name for a reader."""
        return f"{self.kernel}{' of ' * bool(self.subject)}{self.subject}, {self.impl}"


@dataclass(frozen=True)
class Served:
    """Shapes of a server's kernels.

    Attributes:
        kinds: Kinds of attention layers; none where vLLM's own kernels serve.
        canvas_length: Tokens of a canvas.
        vocab: Ids, see :func:`few_tiles`.
        hidden: Width of soft embeddings; ``None`` where steps leave none.
        softcap: Cap of the logits; ``None`` without one.
        dtype: Name of the weights' dtype in torch.
        max_model_len: Longest sequence.
        attention: Implementation of attention that serves.
        anchor: Anchor of windows.
        spans: Lengths of the blocks in which causal rows see each other; 0 for none.
        block_size: Positions of a cache block.
    """

    kinds: tuple[LayerKind, ...]
    canvas_length: int
    vocab: int
    hidden: int | None
    softcap: float | None
    dtype: str
    max_model_len: int
    attention: Impl = "auto"
    anchor: str = "canvas"
    spans: tuple[int, ...] = (0,)
    block_size: int = 16

    @staticmethod
    def of(vllm_config: VllmConfig) -> Served:
        """Describe what a configuration serves."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        plan: DiffusionPlan = model.diffusion
        spec = plan.spec
        assert spec is not None
        ids_of_rank = -(-model.get_vocab_size() // vllm_config.parallel_config.tensor_parallel_size)
        variants = span_variants(spec.layout.has_spans, model.is_mm_prefix_lm)
        return Served(
            kinds=tuple(_layer_kinds(vllm_config)) if plan.own_attention else (),
            canvas_length=spec.length,
            vocab=few_tiles(ids_of_rank),
            # Only uniformly random canvases are conditioned on the step before.
            hidden=model.get_hidden_size() if spec.mask_token_id is None else None,
            softcap=getattr(model.hf_text_config, "final_logit_softcapping", None),
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=model.max_model_len,
            attention=plan.settings.attention,
            anchor=plan.settings.window_anchor,
            spans=tuple(spec.length if has_spans else 0 for has_spans in variants),
            block_size=cache.block_size or 16,
        )

    def cases(self) -> Iterator[KernelCase]:
        """Yield every implementation of each kernel that runs, those first that others rely on."""
        yield KernelCase("device", "", "PyTorch")
        yield KernelCase("noise", "", "PyTorch")
        for impl in ("triton", "cute", "reference"):
            for kind in self.kinds:
                passes = tuple(self._passes(kind))
                # FlashAttention-4 has no image spans; Triton runs those.
                own = tuple(each for each in passes if impl != "cute" or not each.span)
                if own:
                    yield KernelCase("attention", kind.name, impl, own)
        shape = RowsShape(
            min(MAX_ROWS, self.canvas_length), self.vocab, TILE, self.softcap, self.dtype
        )
        if self.hidden is not None:
            shape = replace(shape, hidden=self.hidden)
        for kernel in ("statistics", "kept rows"):
            for impl in ("triton", "reference"):
                yield KernelCase(kernel, "", impl, (replace(shape, adjusted=True), shape))

    def serves(self, case: KernelCase) -> bool:
        """Return true if a case's implementation serves here, by default or by the settings."""
        if case.kernel != "attention":
            return case.impl in ("PyTorch", "triton")
        return case.impl == ("triton" if self.attention == "auto" else self.attention)

    def _passes(self, kind: LayerKind) -> Iterator[AttentionShape]:
        """Yield the passes that check a kind of layer, with each kind of span."""
        for span in self.spans:
            shape = AttentionShape(
                kind.num_heads,
                kind.num_kv_heads,
                kind.head_dim,
                kind.window,
                anchor=self.anchor,
                span=span,
                block_size=self.block_size,
                dtype=self.dtype,
                is_fp8=kind.cache_dtype.startswith("fp8"),
            )
            yield from shape.passes(self.canvas_length, self.max_model_len)


def published_26b() -> Served:
    """Describe DiffusionGemma-26B on one GPU: its two kinds of layers, and its canvases."""
    from vllm_diffusion.attention.backend import LayerKind

    return Served(
        kinds=(LayerKind(16, 8, 256, 1023, "auto"), LayerKind(16, 2, 512, -1, "auto")),
        canvas_length=256,
        vocab=few_tiles(262144),
        hidden=2816,
        softcap=30.0,
        dtype="bfloat16",
        max_model_len=32768,
    )


def few_tiles(num_ids: int) -> int:
    """Return the smallest vocabulary size that is tiled the same way: two full tiles and the same
    remainder.

    Every further tile repeats a launch, on the same sizes and strides, for which Triton compiles.
    """
    return min(num_ids, 2 * TILE + (num_ids - 1) % TILE + 1)


def _layer_kinds(vllm_config: VllmConfig) -> Iterator[LayerKind]:
    """Yield the kinds of attention layers of a rank, each once, from the checkpoint's numbers."""
    from vllm_diffusion.attention.backend import LayerKind

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text_config, architecture = model.hf_text_config, model.model_arch_config
    types = getattr(text_config, "layer_types", None) or []
    seen = set()
    for i in range(architecture.total_num_hidden_layers):
        layer = architecture[i]
        is_sliding = i < len(types) and types[i] == "sliding_attention"
        kind = LayerKind(
            model.get_num_attention_heads(parallel, layer),
            model.get_num_kv_heads(parallel, layer),
            layer.head_size,
            text_config.sliding_window - 1 if is_sliding else -1,
            vllm_config.cache_config.cache_dtype,
        )
        if kind not in seen:
            seen.add(kind)
            yield kind
