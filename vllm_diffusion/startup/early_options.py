"""Options at which vLLM would end with a stack trace before it asks this package about the model.

Their sentences are in ``refused_options.toml``, as are those of :mod:`unsupported_options`, which
checks the whole configuration later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.startup.refused_options import refusal
from vllm_diffusion.startup.request_capacity import note_given_limits
from vllm_diffusion.startup.unknown_architecture import unknown_architecture

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs


def _is_changed(settings: Any) -> bool:
    """Return true if a dataclass of settings differs from its defaults."""
    return bool(settings != type(settings)())


CONDITIONS: dict[str, Callable[[EngineArgs, ModelConfig], object]] = {
    "--enable-eplb": lambda arguments, model: arguments.enable_eplb,
    # vLLM's workers refuse it with a stack trace, and its command line drops settings without the
    # flag.
    "--enable-fault-tolerance": lambda arguments, model: (
        (arguments.enable_fault_tolerance or _is_changed(arguments.fault_tolerance_config))
        and arguments.all2all_backend not in ("deepep_low_latency", "nixl_ep")
    ),
    "--model-impl": lambda arguments, model: arguments.model_impl not in ("auto", "vllm"),
    "--disable-sliding-window": lambda arguments, model: (
        arguments.disable_sliding_window
        and getattr(model.hf_text_config, "sliding_window", None) is not None
    ),
}


def install(architectures: Collection[str], by_type: Mapping[str, tuple[str, ...]]) -> None:
    """Check the arguments as soon as vLLM has the model's configuration. This is safe to call twice.

    Args:
        architectures: Architectures of the models to check.
        by_type: Architectures that are served, for each ``model_type`` whose configuration is ours.
    """
    _looking.install(frozenset(architectures), by_type)


@replaces_call(
    "vllm.engine.arg_utils:EngineArgs.create_model_config",
    reason="Refuses options at which vLLM ends with a trace; notes limits that the operator set.",
    until="verify_and_update_config is called with the arguments, before any option is applied to the model.",
)
def _looking(
    stock: Callable[[EngineArgs], ModelConfig],
    architectures: frozenset[str],
    by_type: Mapping[str, tuple[str, ...]],
    self: Any,
) -> ModelConfig:
    # vLLM removes the window from a configuration before its architecture is known.
    disables_window, self.disable_sliding_window = self.disable_sliding_window, False
    try:
        model_config = stock(self)
    except Exception:
        sentence = unknown_architecture(self, by_type)
        if sentence is None:
            raise
        raise ValueError(sentence) from None
    finally:
        self.disable_sliding_window = disables_window
    if not architectures.isdisjoint(getattr(model_config.hf_config, "architectures", None) or ()):
        for name, is_set in CONDITIONS.items():
            if is_set(self, model_config):
                raise ValueError(refusal(name))
    if disables_window:
        model_config = stock(self)
    note_given_limits(self, model_config)
    return model_config
