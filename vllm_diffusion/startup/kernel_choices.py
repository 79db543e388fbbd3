"""Choice of the implementation that serves of each kernel, which the self-check and tuning make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from vllm_diffusion.startup.plugin_settings import plugin_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from attention_kernels.canvas_attention import Impl as AttentionImpl
    from attention_kernels.vocab_statistics import Impl as StatisticsImpl

# Passes in which no request has more rows than a canvas, and all others (prompts, encoded canvases).
PassPhase = Literal["denoise", "mixed"]
PHASES: tuple[PassPhase, ...] = get_args(PassPhase)
# Which of vLLM's two kernels writes the KV cache, or PyTorch.
CacheWriter = Literal["auto", "triton", "compiled", "reference"]


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
        most_splits: Most pieces that keys are cut into, likewise; ``MAX_SPLITS`` where it says nothing.
        cache_writes: Kernel that writes keys and values into the cache.
        statistics: Implementation of the statistics over the vocabulary.
        kept_rows: Implementation of filters and log-probabilities, which look at rows again.
        attention_graphs: True if CUDA graphs may hold attention.
        step_graphs: True if sampling and the decision are captured as CUDA graphs.
        skip_unlikely: True to leave out of soft embeddings what is too unlikely for their dtype.
        two_streams: True to project a tile of the vocabulary on a second stream beside the one before.
    """

    default_attention: AttentionImpl = "auto"
    attention: Mapping[str, Mapping[PassPhase, AttentionImpl]] = field(default_factory=dict)
    most_splits: Mapping[str, Mapping[PassPhase, int]] = field(default_factory=dict)
    cache_writes: CacheWriter = "auto"
    statistics: StatisticsImpl = "auto"
    kept_rows: StatisticsImpl = "auto"
    attention_graphs: bool = True
    step_graphs: bool = True
    skip_unlikely: bool = False
    two_streams: bool = False

    def __post_init__(self) -> None:
        from attention_kernels.canvas_attention import MAX_SPLITS
        from attention_kernels.canvas_attention import Impl as AttentionImpl
        from attention_kernels.vocab_statistics import Impl as StatisticsImpl

        served = {"default_attention": self.default_attention}
        _check_names(
            served | _by_phase("attention", self.attention),
            get_args(AttentionImpl),
        )
        for name, most in _by_phase("most_splits", self.most_splits).items():
            if type(most) is not int or not 1 <= most <= MAX_SPLITS:
                raise ValueError(f"{name}={most!r} must be an integer from 1 to {MAX_SPLITS}.")
        of_rows = {"statistics": self.statistics, "kept_rows": self.kept_rows}
        _check_names(of_rows, get_args(StatisticsImpl))
        _check_names({"cache_writes": self.cache_writes}, get_args(CacheWriter))
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

    def captures_attention(self, phase: PassPhase) -> bool:
        """Report whether CUDA graphs of a phase hold attention, all of whose layers are in one graph.

        No graph holds the reference, which reads the batch on the host.
        """
        used: set[str] = {phases[phase] for phases in self.attention.values() if phase in phases}
        used |= {self.default_attention, self.cache_writes}
        return self.attention_graphs and "reference" not in used

    def attention_of(self, kind: LayerKind, phase: PassPhase) -> AttentionImpl:
        """Return the implementation of one kind of layer in one kind of pass."""
        return self.attention.get(kind.name, {}).get(phase, self.default_attention)

    def most_splits_of(self, kind: LayerKind, phase: PassPhase) -> int:
        """Return the most pieces of keys in one kind of layer in one kind of pass."""
        from attention_kernels.canvas_attention import MAX_SPLITS

        return self.most_splits.get(kind.name, {}).get(phase, MAX_SPLITS)

    def lines(self) -> Iterator[str]:
        """Yield what can be tuned, each choice in a line."""
        for kind, phases in self.attention.items():
            for phase, impl in phases.items():
                most = self.most_splits.get(kind, {}).get(phase)
                pieces = "" if most is None else f", splits up to {most}"
                yield f"attention of {kind}, {phase}: {impl}{pieces}"
        yield f"skip_unlikely: {str(self.skip_unlikely).lower()}"
        yield f"streams of the sampler: {2 if self.two_streams else 1}"


def _by_phase(name: str, kinds: Any) -> dict[str, Any]:
    """Return what each kind of layer has in each phase, by a name for messages."""
    if not isinstance(kinds, Mapping) or not all(isinstance(x, Mapping) for x in kinds.values()):
        raise ValueError(f"{name}={kinds!r} must be an object of kinds of layers, each of phases.")
    unknown = {phase for phases in kinds.values() for phase in phases} - set(PHASES)
    if unknown:
        raise ValueError(f"phase {min(unknown)!r} of {name} is not one of {', '.join(PHASES)}.")
    return {
        f"{name} of {kind}, {phase}": found
        for kind, phases in kinds.items()
        for phase, found in phases.items()
    }


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
    # Put there by tuned_file.py, where the operator names a file.
    tuned: KernelChoices = getattr(vllm_config.model_config, "tuned_kernels", DEFAULT_KERNELS)
    if settings.attention != "auto":
        tuned = replace(
            tuned,
            default_attention=settings.attention,  # type: ignore[arg-type]
            attention={},
            most_splits={},
        )
    if settings.skip_unlikely is not None:
        tuned = replace(tuned, skip_unlikely=settings.skip_unlikely)
    return tuned
