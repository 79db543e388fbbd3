"""Diffusion models that this package does not serve, and that vLLM would write token after token.

With ``--trust-remote-code``, as their pages say, vLLM's Transformers back end takes a class of any
repository for a causal model. A diffusion model would then answer wrongly, without a word.
"""

import functools
import logging
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")

# Fields that a diffusion model has besides a mask token: the length of what is denoised together.
_LENGTHS = ("block_size", "block_length", "bd_size", "canvas_length")


@functools.cache
def unserved_models() -> Mapping[str, list[str]]:
    """Read the models that are not served: their classes, by name."""
    text = files("vllm_diffusion.families").joinpath("unserved.toml").read_text(encoding="utf-8")
    classes: dict[str, list[str]] = tomllib.loads(text)["classes"]
    return classes


def unserved_sentence(name: str) -> str:
    """Return why a model is refused, and what to do."""
    return (
        f"{name} is a diffusion model that neither vLLM nor vllm-diffusion serves: written token after token, as vLLM "
        "would, its answers are wrong. Run it with its publisher's code, or take a model of docs/use/models.md; "
        "docs/develop/add-a-family.md states what it takes to serve it."
    )


def unserved_by_class(config: Mapping[str, Any]) -> str | None:
    """Return the sentence for a configuration whose class is known not to be served; ``None`` for
    any other.
    """
    names = {*(config.get("architectures") or ()), *classes_of_code(config.get("auto_map"))}
    known = unserved_models().items()
    found = next((name for name, classes in known if not names.isdisjoint(classes)), None)
    return None if found is None else unserved_sentence(found)


def check_other_model(model_config: Any) -> None:
    """Refuse a diffusion model that is served by nobody, and warn of what may be one.

    Args:
        model_config: vLLM's ``ModelConfig`` of a model that is not this package's.

    Raises:
        ValueError: With the model's name and what to do.
    """
    from vllm.model_executor.models import ModelRegistry

    config = model_config.hf_config.to_dict()
    if not set(ModelRegistry.get_supported_archs()).isdisjoint(config.get("architectures") or ()):
        return
    if (sentence := unserved_by_class(config)) is not None:
        raise ValueError(sentence)
    is_masked = config.get("mask_token_id") is not None and any(
        config.get(name) is not None for name in _LENGTHS
    )
    signs = [name for name in config if "diffusion" in name.lower()]
    if "diffusion" in str(config.get("model_type")).lower() or is_masked or signs:
        logger.warning(
            "config.json of %s looks like that of a diffusion model (%s) that vllm-diffusion does not know: vLLM "
            "decodes it token by token. If it is a diffusion model, its answers are wrong.",
            model_config.model,
            ", ".join(signs) or ("a mask token and a block" if is_masked else "model_type"),
        )


def classes_of_code(auto_map: Any) -> Iterable[str]:
    """Return the names of the classes that ``auto_map`` of a ``config.json`` names."""
    paths = auto_map.values() if isinstance(auto_map, Mapping) else ()
    return (str(path).rpartition(".")[2] for path in paths)
