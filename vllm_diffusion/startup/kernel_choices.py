"""Choice of the implementation that serves of each kernel, which the self-check and tuning make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from vllm_diffusion.startup.plugin_settings import plugin_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from attention_kernels.canvas_attention import Impl as AttentionImpl
    from attention_kernels.vocab_statistics import Impl as StatisticsImpl

# Passes in which no request has more rows than a canvas, and all others (prompts, encoded canvases).
Phase = Literal["denoise", "mixed"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class LayerKind:
    """Kind of attention layers, which run the same kernels.

    Attributes:
        num_heads: Query heads of a rank.
        num_kv_heads: Key and value heads of a rank.
        head_dim: Head size.
        window: Keys beside a row that a sliding window holds; -1 without one.
        cache_dtype: vLLM's ``kv_cache_dtype`` of the layers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    cache_dtype: str

    @property
    def name(self) -> str:
        """Key of the kind in :attr:`KernelChoices.attention`."""
        window = "full" if self.window < 0 else f"window {self.window}"
        cache = "" if self.cache_dtype == "auto" else f", {self.cache_dtype} cache"
        heads = f"{self.num_heads} heads on {self.num_kv_heads} of {self.head_dim}"
        return f"{heads}, {window}{cache}"


@dataclass(frozen=True)
class KernelChoices:
    """Implementations that serve, equal on all ranks whose GPUs are alike.

    Attributes:
        default_attention: Implementation of attention that ``attention`` says nothing of.
        attention: Implementations of attention by :attr:`LayerKind.name` and phase.
        statistics: Implementation of the statistics over the vocabulary.
        kept_rows: Implementation of filters and log-probabilities, which look at rows again.
        attention_graphs: True if CUDA graphs may hold attention.
        step_graphs: True if sampling and the decision are captured as CUDA graphs.
        skip_unlikely: True to leave out of soft embeddings what is too unlikely for their dtype.
        two_streams: True to project a tile of the vocabulary on a second stream beside the one before.
    """

    default_attention: AttentionImpl = "auto"
    attention: Mapping[str, Mapping[Phase, AttentionImpl]] = field(default_factory=dict)
    statistics: StatisticsImpl = "auto"
    kept_rows: StatisticsImpl = "auto"
    attention_graphs: bool = True
    step_graphs: bool = True
    skip_unlikely: bool = False
    two_streams: bool = False

    def __post_init__(self) -> None:
        from attention_kernels.canvas_attention import Impl as AttentionImpl
        from attention_kernels.vocab_statistics import Impl as StatisticsImpl

        served = {"default_attention": self.default_attention}
        for kind, phases in self.attention.items():
            served |= {f"attention of {kind}, {phase}": impl for phase, impl in phases.items()}
            unknown = [phase for phase in phases if phase not in PHASES]
            if unknown:
                raise ValueError(f"phase {unknown[0]!r} is not one of {', '.join(PHASES)}.")
        _check_names(served, get_args(AttentionImpl))
        of_rows = {"statistics": self.statistics, "kept_rows": self.kept_rows}
        _check_names(of_rows, get_args(StatisticsImpl))
        for name in ("attention_graphs", "step_graphs", "skip_unlikely", "two_streams"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false.")

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> KernelChoices:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: Naming a field or a value that does not exist.
        """
        unknown = content.keys() - {each.name for each in fields(KernelChoices)}
        if unknown:
            raise ValueError(f"{min(unknown)} is not a choice of kernels.")
        return KernelChoices(**content)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @property
    def captures_attention(self) -> bool:
        """True if CUDA graphs hold attention: not the reference, which reads the batch on the host."""
        used = {impl for phases in self.attention.values() for impl in phases.values()}
        return self.attention_graphs and "reference" not in {self.default_attention, *used}

    def attention_of(self, kind: LayerKind, phase: Phase) -> AttentionImpl:
        """Return the implementation of one kind of layer in one kind of pass."""
        return self.attention.get(kind.name, {}).get(phase, self.default_attention)


def _check_names(served: Mapping[str, str], known: tuple[str, ...]) -> None:
    for name, impl in served.items():
        if impl not in known:
            raise ValueError(f"{name}={impl!r} is not one of {', '.join(known)}.")


DEFAULT_KERNELS = KernelChoices()


def kernel_choices(vllm_config: VllmConfig) -> KernelChoices:
    """Return what the worker decided, or the operator's settings where nothing has decided yet."""
    decided: KernelChoices | None = getattr(vllm_config.model_config, "kernel_choices", None)
    if decided is not None:
        return decided
    settings = plugin_settings(vllm_config)
    return KernelChoices(
        default_attention=settings.attention,  # type: ignore[arg-type]
        skip_unlikely=settings.skip_unlikely,
    )
