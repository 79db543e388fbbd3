"""Ways to draft for a target, each as the options of a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_diffusion.cli import values
from vllm_diffusion.drafting.commands.draft_runs import Contender

DFLASH, ADAPTIVE, NGRAM = "dflash", "adaptive", "ngram"
# vLLM's methods; those of models with heads for it (MTP) have names of their own too, in _mtp.
METHODS = (
    *(DFLASH, ADAPTIVE, NGRAM, "eagle3", "draft_model"),
    *("dspark", "eagle", "mtp", "ngram_gpu", "suffix"),
)
# What the tiny pair is measured with.
TINY_METHODS = (DFLASH, ADAPTIVE)
# Those whose tokens come from the text so far, or from the target's own heads.
_WITHOUT_A_DRAFT = (NGRAM, "mtp", "ngram_gpu", "suffix")
# What vLLM looks for in the text so far: its own default is five tokens, no less.
_NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


def draft_method(value: str) -> str:
    """Read a method of vLLM's to draft."""
    if value not in METHODS and not value.endswith("_mtp"):
        raise values.Refusal(f"{value!r} must be one of {', '.join(METHODS)}, or a name in _mtp.")
    return value


def named_draft(value: str) -> tuple[str, str]:
    """Read ``MODEL`` or ``METHOD=MODEL``, into the method, empty where none is named, and the model."""
    method, is_named, name = value.partition("=")
    # A path may have the sign too, a method has no slash.
    if not is_named or "/" in method:
        return "", values.model(value)
    return draft_method(method), values.model(name)


def contenders(
    given: Sequence[tuple[str, str]],
    *,
    methods: Sequence[str],
    steps: Sequence[int],
    num_drafts: int,
) -> list[Contender]:
    """Return the server without a draft, and one for every way to draft.

    Args:
        given: Method, empty for DFlash, and model of each draft.
        methods: Ways to draft; empty for all that have what they need.
        steps: Passes of DFlash drafts.
        num_drafts: Tokens of those without a block.

    Raises:
        UsageError: If a method has no draft, or a draft cannot be read.
    """
    drafts: dict[str, list[str]] = {}
    for method, model in given:
        drafts.setdefault(method or DFLASH, []).append(model)
    if DFLASH in drafts:
        drafts[ADAPTIVE] = drafts[DFLASH]
    entrants = [Contender("no draft")]
    for method in methods or dict.fromkeys((*drafts, NGRAM)):
        if method not in drafts and method not in _WITHOUT_A_DRAFT:
            needed = "MODEL" if method in (DFLASH, ADAPTIVE) else f"{method}=MODEL"
            raise values.UsageError(f"--method {method} needs a draft: give --draft {needed}.")
        models = drafts.get(method, [""])
        for model in models:
            name = method if len(models) < 2 else f"{method} {Path(model).name}"
            if method == DFLASH:
                for passes in steps:
                    several = f", {passes} pass{'es' * (passes > 1)}" if len(steps) > 1 else ""
                    # One pass is what stock has.
                    settings = {"steps": passes} if passes > 1 else {}
                    entrants.append(Contender(name + several, dflash_options(model, settings)))
            elif method == ADAPTIVE:
                entrants.append(Contender(name, dflash_options(model, {"adaptive": True})))
            else:
                config = {"method": method, "num_speculative_tokens": num_drafts}
                config |= {"model": model} if model else {}
                config |= _NGRAM if method == NGRAM else {}
                entrants.append(Contender(name, _options(config)))
    return entrants


def dflash_options(model: str, settings: dict[str, Any] | None = None) -> tuple[str, ...]:
    """Return options of ``vllm serve`` for a DFlash draft and the whole of its blocks.

    Args:
        model: The draft.
        settings: Content of ``additional_config["drafting"]``.

    Raises:
        UsageError: If its ``config.json`` cannot be read, or has no block.
    """
    config = draft_config(model)
    # Some publishers have it among the fields of DFlash.
    block_size = config.get("block_size") or config.get("dflash_config", {}).get("block_size")
    if not isinstance(block_size, int) or block_size < 2:
        raise values.UsageError(
            f"--draft {model}: block_size={block_size!r} in its config.json is not that of a DFlash draft; "
            "a draft of another method is given as METHOD=MODEL."
        )
    speculative = {"method": DFLASH, "num_speculative_tokens": block_size - 1, "model": model}
    return _options(speculative, settings)


def _options(
    speculative: dict[str, Any], drafting: dict[str, Any] | None = None
) -> tuple[str, ...]:
    options = ["--speculative-config", json.dumps(speculative)]
    if drafting:
        options += ["--additional-config", json.dumps({"drafting": drafting})]
    return tuple(options)


def draft_config(model: str) -> dict[str, Any]:
    """Read the ``config.json`` of a draft.

    Raises:
        UsageError: If it cannot be read.
    """
    from transformers import PreTrainedConfig

    try:
        config: dict[str, Any] = PreTrainedConfig.get_config_dict(model)[0]
    except (OSError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise values.UsageError(
            f"--draft {model}: its config.json cannot be read: {problem}"
        ) from None
    return config
