"""Run as a program in a fresh process: what vLLM resolved there, printed as JSON.

``python snapshot.py [FOLDER ...]``, a folder holding the ``config.json`` of a model.
"""

import atexit
import dataclasses
import gc
import json
import re
import sys
from typing import Any

from vllm_diffusion.families.registry import FAMILIES

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
# What is served, what is refused by name, and the draft for other models.
OURS = {family.architecture for family in FAMILIES} | {"DFlashMaskedDraftModel"}


def tables() -> dict[str, Any]:
    """Return what a plugin of ours may change for diffusion models, and all that it must not."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.engine.input_processor import InputProcessor

    models = {name: _model_name(entry) for name, entry in ModelRegistry.models.items()}
    hooks = {name: _name(hook) for name, hook in MODELS_CONFIG_MAP.items()}
    return {
        "platform": _name(type(current_platform)),
        "model": models.get(ARCHITECTURE),
        "config_hook": hooks.get(ARCHITECTURE),
        "validation": [_name(InputProcessor.process_inputs)],
        "other_models": {name: value for name, value in models.items() if name not in OURS},
        "other_config_hooks": {name: value for name, value in hooks.items() if name not in OURS},
    }


def resolved(folder: str) -> dict[str, Any]:
    """Return a model's whole configuration, and the refusals of its requests."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

    config = EngineArgs(model=folder, skip_tokenizer_init=True).create_engine_config()
    requests = {
        "plain": {},
        "temperature": {"temperature": 0.3, "seed": 1, "min_p": 0.1},
        "edits": {"logit_bias": {5: 1.0}, "min_tokens": 2, "presence_penalty": 1.0},
        "prompt_logprobs": {"prompt_logprobs": 2},
        "too many logprobs": {"logprobs": 1000},
        "diffusion arguments": {"extra_args": {"diffusion_max_steps": -1}},
        "structured": {"structured_outputs": {"regex": "a"}},
    }
    return {
        "scheduler": _name(config.scheduler_config.get_scheduler_cls()),
        "hash": config.compute_hash(),
        "config": config,
        "requests": {
            name: _refusal(SamplingParams(**params), config) for name, params in requests.items()
        },
    }


def _refusal(params: Any, config: Any) -> str | None:
    from vllm.sampling_params import StructuredOutputsParams

    from tests.support.engines.admission import validate

    if isinstance(params.structured_outputs, dict):
        params.structured_outputs = StructuredOutputsParams(**params.structured_outputs)
    try:
        validate(params, config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _model_name(entry: Any) -> str:
    if hasattr(entry, "module_name"):
        return f"{entry.module_name}:{entry.class_name}"
    return _name(entry.model_cls)


def _plain(value: Any) -> Any:
    """Return for JSON what is none of its types, field by field, without what differs between equal
    runs.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Besides an engine's random name.
        names = {field.name for field in dataclasses.fields(value)} - {"instance_id"}
        found = {name: getattr(value, name, None) for name in names}
        return {"class": _name(type(value)), **found}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


if __name__ == "__main__":
    # Collections would walk the million objects that imports make: a third of this process's time.
    gc.disable()
    atexit.register(gc.freeze)
    found = {"tables": tables(), "models": [resolved(folder) for folder in sys.argv[1:]]}
    print("SNAPSHOT" + json.dumps(found, sort_keys=True, default=_plain))
