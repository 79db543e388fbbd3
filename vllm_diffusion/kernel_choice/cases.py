"""The kernels that a configuration serves, each with small inputs of the served shapes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from attention_kernels.checks import AttentionShape, RowsShape
from vllm_diffusion.kernel_choice.step_shape import StepShape
from vllm_diffusion.startup.kernel_choices import (
    PHASES,
    CacheWriter,
    KernelChoices,
    LayerKind,
    PassPhase,
)
from vllm_diffusion.startup.passes import MAX_CANVASES
from vllm_diffusion.startup.plugin_settings import plugin_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Kernel = Literal[
    "device",
    "noise",
    "cache writes",
    "attention",
    "statistics",
    "kept rows",
    "attention graph",
    "step graph",
]
# Tokens before a canvas: keys in one piece, and cut into splits. Longer ones repeat the same loop.
CONTEXTS = (300, 3000)
# Rows of small inputs, and ids of a tile. The sampler's is a multiple: Triton compiles the same for both.
MAX_ROWS, TILE = 64, 8192


@dataclass(frozen=True)
class KernelCase:
    """One implementation of one kernel, on inputs that are checked in a process of its own.

    Attributes:
        kernel: Which check.
        subject: Layers and passes, or empty.
        impl: Implementation that is checked.
        shapes: Inputs, one after another; the last is timed.
    """

    kernel: Kernel
    subject: str
    impl: str
    shapes: tuple[AttentionShape | RowsShape | StepShape, ...] = ()

    @property
    def name(self) -> str:
        """Name for a reader."""
        return f"{self.kernel}{' of ' * bool(self.subject)}{self.subject}, {self.impl}"

    @functools.cached_property
    def key(self) -> str:
        """Name with a hash of the inputs, by which an outcome is remembered."""
        return f"{self.name} [{hashlib.sha256(repr(self.shapes).encode()).hexdigest()[:12]}]"


@dataclass(frozen=True)
class Role:
    """A kernel that serving runs, with the implementations that can serve it, the best first.

    Attributes:
        cases: A case for each implementation.
        kind: Kind of the attention layers.
        phase: Phase of their passes.
    """

    cases: tuple[KernelCase, ...]
    kind: LayerKind | None = None
    phase: PassPhase | None = None


@dataclass(frozen=True)
class Served:
    """Shapes of a server's kernels, and the implementations that are wanted.

    Attributes:
        kinds: Kinds of attention layers; none where vLLM's own kernels serve.
        step: Shape of a denoising step, with the implementations that are to serve.
        max_model_len: Longest sequence.
        anchor: Anchor of windows.
        spans: Lengths of the blocks in which causal rows see each other; 0 for none.
        block_size: Positions of a cache block.
        uses_graphs: True if CUDA graphs are captured.
    """

    kinds: tuple[LayerKind, ...]
    step: StepShape
    max_model_len: int
    anchor: str = "canvas"
    spans: tuple[int, ...] = (0,)
    block_size: int = 16
    uses_graphs: bool = True

    @staticmethod
    def of(vllm_config: VllmConfig, choices: KernelChoices) -> Served:
        """Describe what a configuration serves with some implementations."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        spec = model.canvas_spec
        dtype = str(model.dtype).removeprefix("torch.")
        text_config, scheduler = model.hf_text_config, vllm_config.scheduler_config
        canvases = scheduler.max_num_batched_tokens // spec.length
        ids_of_rank = -(-model.get_vocab_size() // vllm_config.parallel_config.tensor_parallel_size)
        step = StepShape(
            spec=spec,
            vocab=few_tiles(ids_of_rank),
            hidden=model.get_hidden_size(),
            # Those of the largest pass that is captured.
            slots=min(scheduler.max_num_seqs, MAX_CANVASES, canvases),
            softcap=getattr(text_config, "final_logit_softcapping", None),
            dtype=dtype,
            # Only uniformly random canvases are conditioned on the step before.
            is_self_conditioned=spec.mask_token_id is None,
            kernels=choices,
        )
        backend = vllm_config.attention_config.backend
        is_ours = backend is not None and backend.name == "CUSTOM"
        has_spans = spec.layout.warmed_spans(model.is_mm_prefix_lm)
        return Served(
            kinds=tuple(_layer_kinds(vllm_config)) if is_ours else (),
            step=step,
            max_model_len=model.max_model_len,
            anchor=plugin_settings(vllm_config).window_anchor,
            spans=tuple(spec.length if spans else 0 for spans in has_spans),
            block_size=cache.block_size or 16,
            uses_graphs=not model.enforce_eager,
        )

    def roles(self) -> Iterator[Role]:
        """Yield the kernels that run, those that others rely on first."""
        yield Role((KernelCase("device", "", "PyTorch"),))
        yield Role((KernelCase("noise", "", "PyTorch"),))
        choices = self.step.kernels
        for kind in self.kinds:
            for phase in PHASES:
                cases = tuple(
                    KernelCase("attention", f"{kind.name}, {phase}", impl, shapes)
                    for impl in attention_order(choices.attention_of(kind, phase))
                    if (shapes := self._run_by(impl, kind, phase))
                )
                yield Role(cases, kind, phase)
        yield from self._of_rows()
        if self.kinds:
            # Last, since it imports vLLM.
            yield self._of_cache(choices.cache_writes)

    def graph_roles(self) -> Iterator[Role]:
        """Yield the graphs that are captured of kernels that were found right."""
        choices, spec = self.step.kernels, self.step.spec
        if not self.uses_graphs:
            return
        if choices.step_graphs:
            subject = f"{type(spec.rule).__name__}, canvases of {spec.length}"
            yield Role((KernelCase("step graph", subject, "CUDA graph", (self.step,)),))
        if choices.captures_attention("denoise"):
            for kind in self.kinds:
                impl = attention_order(choices.attention_of(kind, "denoise"))[0]
                longest = self._run_by(impl, kind, "denoise")[-1:]
                yield Role((KernelCase("attention graph", kind.name, impl, longest),), kind)

    def _of_cache(self, chosen: CacheWriter) -> Role:
        """Return the kernels that write the cache: either of vLLM's, or PyTorch."""
        shapes = tuple(next(self._attention(kind, "denoise")) for kind in self.kinds)
        first = "triton" if chosen == "auto" else chosen
        order = dict.fromkeys((first, "triton", "compiled", "reference"))
        return Role(tuple(KernelCase("cache writes", "", impl, shapes) for impl in order))

    def _run_by(self, impl: str, kind: LayerKind, phase: PassPhase) -> tuple[AttentionShape, ...]:
        """Return the passes that an implementation runs: FlashAttention-4 none with image spans."""
        passes = self._attention(kind, phase)
        return tuple(each for each in passes if not (impl == "cute" and each.span))

    def _attention(self, kind: LayerKind, phase: PassPhase) -> Iterator[AttentionShape]:
        """Yield passes of a kind of layer."""
        C = self.step.spec.length
        passes: tuple[tuple[tuple[int, int], ...], ...] = (((C, 0), (C, 0)),)
        if phase == "mixed":
            passes = (((2 * C, C), (C, 0)), ((C + 5, C + 5), (C, 0)))
        contexts = sorted(
            {min(context, max(1, self.max_model_len - 2 * C)) for context in CONTEXTS}
        )
        for span in self.spans:
            for rows in passes:
                for context in contexts:
                    yield AttentionShape(
                        kind.num_heads,
                        kind.num_kv_heads,
                        kind.head_dim,
                        kind.window,
                        rows,
                        context,
                        anchor=self.anchor,
                        span=span,
                        block_size=self.block_size,
                        dtype=self.step.dtype,
                        is_fp8=kind.cache_dtype.startswith("fp8"),
                        most_splits=self.step.kernels.most_splits_of(kind, phase),
                    )

    def _of_rows(self) -> Iterator[Role]:
        """Yield the kernels of the sampler."""
        step = self.step
        num_rows = min(MAX_ROWS, step.spec.length)
        plain = RowsShape(num_rows, step.vocab, TILE, step.softcap, step.dtype)
        if step.is_self_conditioned:
            plain = replace(plain, hidden=step.hidden)
        skipping = step.is_self_conditioned and step.kernels.skip_unlikely
        shapes = (replace(plain, adjusted=True), replace(plain, is_skipping=skipping))
        for kernel, chosen in (
            ("statistics", step.kernels.statistics),
            ("kept rows", step.kernels.kept_rows),
        ):
            order = ("reference",) if chosen == "reference" else ("triton", "reference")
            yield Role(tuple(KernelCase(kernel, "", impl, shapes) for impl in order))  # type: ignore[arg-type]


def attention_order(chosen: str) -> tuple[str, ...]:
    """Return the implementations of attention that may serve, the chosen one first.

    vLLM's own kernels know one causal flag for a sequence, and not our rule: none of them stands in.
    """
    if chosen == "reference":
        return ("reference",)
    rest = [impl for impl in ("triton", "cute") if impl != chosen]
    return ("triton", "cute", "reference") if chosen == "auto" else (chosen, *rest, "reference")


def published_26b() -> Served:
    """Describe DiffusionGemma-26B on one GPU: its two kinds of layers, and its canvases."""
    kinds = (LayerKind(16, 8, 256, 1023, "auto"), LayerKind(16, 2, 512, -1, "auto"))
    return Served(kinds, StepShape(vocab=few_tiles(262144)), max_model_len=32768)


def few_tiles(num_ids: int) -> int:
    """Return as few ids as are cut like a vocabulary: two whole tiles, and the last as it is there.

    Every further tile repeats a launch, on the same sizes and strides, for which Triton compiles.
    """
    return min(num_ids, 2 * TILE + (num_ids - 1) % TILE + 1)


def _layer_kinds(vllm_config: VllmConfig) -> Iterator[LayerKind]:
    """Yield the kinds of attention layers of a rank, each once, from the checkpoint's numbers."""
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
