"""Entry point that vLLM calls in every process before it reads a model's configuration.

Nothing here raises and nothing heavy is imported: a failure would break every vLLM command, also
for models that are not ours. Failures are reported when a diffusion checkpoint is configured.
"""

import logging
from pkgutil import resolve_name
from typing import Any

from vllm_diffusion.families.registry import FAMILIES, Family
from vllm_diffusion.hooks.own_entry_points import own_entry_points
from vllm_diffusion.hooks.upstream import INSTALL
from vllm_diffusion.startup.environment import is_disabled

logger = logging.getLogger("vllm.vllm_diffusion")

# Parser for Gemma's tool calls in place of vLLM's; it leaves other models to vLLM's own.
_TOOL_PARSER = "vllm_diffusion.requests.tool_calls.gemma_parser:GemmaToolParser"


def register() -> None:
    """Register the start-up checks and model class of every family, and what they share.

    This is safe to call twice. A family's start-up checks keep a failure, and report it when one of
    its checkpoints is configured.
    """
    if is_disabled():
        return
    try:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from vllm_diffusion.requests.require_key import guard_adapters
        from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig

        BlockDiffusionEngineConfig.guard_server = staticmethod(guard_adapters)
        BlockDiffusionEngineConfig.install_api = staticmethod(_install_api)
    except Exception as error:
        # Without our checks stock vLLM would serve such a checkpoint unnoticed, so this is an
        # error.
        _log(logging.ERROR, "any diffusion checkpoint", error)
        return
    _register_extensions()
    shared_failure = _register_shared()
    for family in FAMILIES:
        entry, failure = _engine_config(family, BlockDiffusionEngineConfig), shared_failure
        # This comes first, so that our checks report every later failure.
        MODELS_CONFIG_MAP[family.architecture] = entry
        try:
            from vllm.model_executor.models import ModelRegistry

            # A family's entry may derive from another's, which has a value of its own.
            if vars(entry).get("is_in_vllm") is None:
                entry.is_in_vllm = family.architecture in ModelRegistry.get_supported_archs()
            _register_model(family)
            if family.config is not None:
                _register_config(family.config)
            if family.tokenizer is not None:
                _register_tokenizer(family.tokenizer)
        except Exception as error:
            failure = failure or error
        entry.registration_failure = entry.registration_failure or failure
        if entry.registration_failure is not None:
            _log(logging.DEBUG, family.architecture, entry.registration_failure)


def _register_shared() -> Exception | None:
    """Register what all families share; return the error if that fails, else ``None``."""
    try:
        from vllm.tool_parsers import ToolParserManager

        from vllm_diffusion.requests import validation
        from vllm_diffusion.startup import engine_process, options
        from vllm_diffusion.startup.attention import register_attention
        from vllm_diffusion.weights.adapters import early_checks

        register_attention()
        engine_process.install()
        validation.install()
        early_checks.note_command_line()
        ToolParserManager.register_lazy_module("gemma4", *_TOOL_PARSER.split(":"))
        options.install(
            options.ServedNames(
                frozenset(family.architecture for family in FAMILIES),
                _by_model_type(),
                {one.published_as: one.architecture for one in FAMILIES if one.published_as},
                {one.text_model: one.architecture for one in FAMILIES if one.text_model},
                {one.beside_adapter: one.architecture for one in FAMILIES if one.beside_adapter},
            )
        )
    except Exception as error:
        return error
    return None


def _install_api() -> None:
    """Put in place what an API process needs for canvases."""
    from vllm_diffusion.live import delivery
    from vllm_diffusion.live import http as endpoints
    from vllm_diffusion.requests import http as door
    from vllm_diffusion.requests import refusals
    from vllm_diffusion.startup import engine_process

    for module in (refusals, delivery, door, endpoints):
        module.install()
    engine_process.end_quietly()


def _register_extensions() -> None:
    """Register parts that diffusion models do not need; without one, vLLM's own serves in its
    place.
    """
    for entry in own_entry_points("vllm_diffusion.extensions"):
        try:
            entry.load()()
        except Exception as error:
            _log(logging.ERROR, entry.name, error)


def _register_model(family: Family) -> None:
    """Register a family's class by its name, so that it is imported only if it is served."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    ModelRegistry.register_model(family.architecture, family.model)
    if type(current_platform).__name__ == "DiffusionCpuPlatform":
        from vllm_diffusion.cpu.inspection import InspectedHere

        entry = InspectedHere(family.architecture, *family.model.split(":"))
        ModelRegistry.models[family.architecture] = entry


def _register_config(path: str) -> None:
    """Register a configuration class, so that ``config.json`` is read without the checkpoint's
    code.
    """
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    config = resolve_name(path)
    for model_type in (config.model_type, *getattr(config, "other_model_types", ())):
        _CONFIG_REGISTRY[model_type] = config


def _register_tokenizer(path: str) -> None:
    """Register a tokenizer's class by its name, so that it is made without code of a checkpoint."""
    from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

    tokenizer = resolve_name(path)
    REGISTERED_TOKENIZER_CLASSES[tokenizer.__name__] = tokenizer


def _by_model_type() -> dict[str, tuple[str, ...]]:
    """Return the served architectures for each ``model_type`` whose configuration is ours."""
    architectures: dict[str, tuple[str, ...]] = {}
    for family in FAMILIES:
        if family.config is not None:
            model_type = resolve_name(family.config).model_type
            architectures[model_type] = (
                *architectures.get(model_type, ()),
                family.architecture,
            )
    return architectures


def _engine_config(family: Family, base: Any) -> Any:
    """Import the family's start-up checks; on failure return checks that report the error."""
    try:
        entry = resolve_name(family.engine_config)
    except Exception as error:
        name = family.engine_config.partition(":")[2]
        return type(name, (base,), {"registration_failure": error})
    entry.registration_failure = None
    return entry


def _log(level: int, what: str, error: Exception) -> None:
    logger.log(
        level,
        "vllm-diffusion could not register itself with this vLLM (%s: %s), so it does not serve "
        "%s here; run %s.",
        type(error).__name__,
        error,
        what,
        INSTALL,
    )
