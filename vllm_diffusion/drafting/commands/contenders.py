"""Servers of a target that are compared, each by its options: with a draft, or with a diffusion
model's own way to decode.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_diffusion.cli import values
from vllm_diffusion.drafting.presets import preset_of

DFLASH, ADAPTIVE, NGRAM = "dflash", "adaptive", "ngram"
# A LoRA with which the target drafts for itself.
UNO = "uno"
# vLLM's methods; those of models with heads for it (MTP) have names of their own too, in _mtp.
METHODS = (
    *(DFLASH, ADAPTIVE, NGRAM, UNO, "eagle3", "draft_model"),
    *("dspark", "eagle", "mtp", "ngram_gpu", "suffix"),
)
# A diffusion model's own way, and all of its ways by turns; its others verify each token.
DIFFUSION, MIXED = "diffusion", "mixed"
# Ways of a diffusion model, in the order of the tables; the first two answer alike.
EXACT = ("autoregressive", "linear_spec")
WAYS = (*EXACT, DIFFUSION, MIXED)
# What the tiny pair is measured with.
TINY_METHODS = (DFLASH, "dflash,steps=2", UNO, ADAPTIVE)
# Those whose tokens come from the text so far, or from what the target has itself.
_WITHOUT_A_DRAFT = (NGRAM, UNO, "mtp", "ngram_gpu", "suffix")
# Tokens drafted where the draft has no block.
_NUM_DRAFTS = 4
# What vLLM looks for in the text so far: its own default is five tokens, no less.
_NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Contender:
    """A server of the target.

    Attributes:
        options: Options of ``vllm serve``, in addition to those of all.
        way: Way in which a diffusion model decodes, where ways are compared; empty where drafts
            are.
        card: Lowest figure of tokens per verification that its draft's publisher gives; 0 if none
            is known, or if its drafts are adaptive.
    """

    name: str
    options: tuple[str, ...] = ()
    way: str = ""
    card: float = 0.0


class Method(NamedTuple):
    """A server of a target, as a command line names it.

    Attributes:
        text: As it was typed, the name of its server.
        name: One of :data:`METHODS` or :data:`WAYS`, or a name in ``_mtp``.
        settings: For DFlash of ``drafting``, for another draft of ``--speculative-config``, for a
            way of ``diffusion``.
    """

    text: str
    name: str
    settings: dict[str, Any]


def named_method(value: str) -> Method:
    """Read ``NAME`` or ``NAME,SETTING=VALUE,...``.

    Raises:
        Refusal: If there is no such method, or a setting has no name or no value.
    """
    name, *pairs = value.split(",")
    is_known = name in (*METHODS, *WAYS) or name.endswith("_mtp")
    split = [pair.partition("=") for pair in pairs]
    if not is_known or not all(key and text for key, _, text in split):
        raise values.Refusal(
            f"{value!r} must be one of {', '.join((*METHODS, *WAYS))}, or a name in _mtp, perhaps with "
            "settings: dflash,steps=2."
        )
    settings: dict[str, Any] = {}
    for key, _, text in split:
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return Method(value, name, settings)


def named_draft(value: str) -> tuple[str, str]:
    """Read ``MODEL`` or ``METHOD=MODEL``, into the method, DFlash where none is named, and the
    model.
    """
    method, is_named, name = value.partition("=")
    # A path may have the sign too, a method has no slash.
    if not is_named or "/" in method:
        return DFLASH, values.model(value)
    chosen = named_method(method).name
    # An adapter is no model: its server says what is wrong with it.
    return chosen, name if chosen == UNO and name else values.model(name)


def contenders(
    methods: Sequence[Method], given: Sequence[tuple[str, str]], target: str = ""
) -> list[Contender]:
    """Return servers, the one that the others are compared with first.

    Args:
        methods: Servers to compare; empty for all drafts that have what they need. Ways, or drafts,
            to which the server without one is added.
        given: Method and model of each draft.
        target: Model that is served; only Uno's class is that of a target.

    Raises:
        UsageError: If a method has no draft, a draft cannot be read, or there are ways and drafts.
    """
    methods = list({method.text: method for method in methods}.values())
    ways = [method for method in methods if method.name in WAYS]
    if ways and (given or len(ways) < len(methods)):
        raise values.UsageError(
            f"--method {ways[0].text} is for diffusion models, which take no draft; measure drafts in a "
            "separate run."
        )
    if ways:
        return [_by_way(way) for way in sorted(ways, key=lambda each: WAYS.index(each.name))]
    drafts: dict[str, list[str]] = {}
    for name, model in given:
        drafts.setdefault(name, []).append(model)
    if DFLASH in drafts:
        drafts[ADAPTIVE] = drafts[DFLASH]
    entrants = [Contender("no draft")]
    for text, name, settings in methods or map(named_method, dict.fromkeys((*drafts, NGRAM))):
        if name not in drafts and name not in _WITHOUT_A_DRAFT:
            needed = "MODEL" if name in (DFLASH, ADAPTIVE) else f"{name}=MODEL"
            raise values.UsageError(f"--method {name} needs a draft: give --draft {needed}.")
        models = drafts.get(name, [""])
        for model in models:
            if name == DFLASH:
                options = _dflash_options(model, settings)
            elif name == ADAPTIVE:
                options = _dflash_options(model, {"adaptive": True, **settings})
            elif name == UNO:
                options = _uno_options(target, model, settings)
            else:
                config = {"method": name, "num_speculative_tokens": _NUM_DRAFTS}
                config |= {"model": model} if model else {}
                config |= _NGRAM if name == NGRAM else {}
                options = ("--speculative-config", json.dumps(config | settings))
            # Adaptive drafts are shorter than those of a card.
            preset = preset_of(model) if name == DFLASH else None
            card = preset.least_kept if preset else 0.0
            server = text if len(models) < 2 else f"{text} {Path(model).name}"
            entrants.append(Contender(server, options, card=card))
    return entrants


def _by_way(method: Method) -> Contender:
    """Return the server of one way, or of all of them by turns."""
    text, way, settings = method
    chosen: dict[str, dict[str, Any]] = {DIFFUSION: {}, MIXED: {"rules": "all"}}
    section = chosen.get(way, {"rule": way}) | settings
    options = ("--additional-config", json.dumps({"diffusion": section})) if section else ()
    return Contender(text, options, way)


def _dflash_options(model: str, settings: dict[str, Any]) -> tuple[str, ...]:
    """Return options of ``vllm serve`` for a DFlash draft and the whole of its blocks.

    Args:
        model: The draft.
        settings: Content of ``additional_config["drafting"]``.

    Raises:
        UsageError: If its ``config.json`` cannot be read, or has no block.
    """
    config = read_config("--draft", model)
    # Some publishers have it among the fields of DFlash.
    block_size = config.get("block_size") or config.get("dflash_config", {}).get("block_size")
    if not isinstance(block_size, int) or block_size < 2:
        raise values.UsageError(
            f"--draft {model}: block_size={block_size!r} in its config.json is not that of a DFlash draft; "
            "give a draft of another method as METHOD=MODEL."
        )
    speculative = {"method": DFLASH, "num_speculative_tokens": block_size - 1, "model": model}
    options = ["--speculative-config", json.dumps(speculative)]
    if settings:
        options += ["--additional-config", json.dumps({"drafting": settings})]
    return tuple(options)


def _uno_options(target: str, adapter: str, settings: dict[str, Any]) -> tuple[str, ...]:
    """Return options of ``vllm serve`` for a target that drafts for itself.

    Args:
        target: The model.
        adapter: The LoRA of its drafts; empty for the one next to the weights.
        settings: Content of ``additional_config["diffusion"]``.
    """
    (architecture, *_) = read_config("target", target).get("architectures") or [""]
    overrides = {"architectures": [f"Uno{architecture}"]}
    section = ({"draft_adapter": adapter} if adapter else {}) | settings
    chosen = ("--additional-config", json.dumps({"diffusion": section})) if section else ()
    return ("--hf-overrides", json.dumps(overrides), *chosen)


def read_config(option: str, model: str) -> dict[str, Any]:
    """Read the ``config.json`` of a model or a draft.

    Raises:
        UsageError: Naming the option that names it, if it cannot be read.
    """
    from transformers import PreTrainedConfig

    try:
        config: dict[str, Any] = PreTrainedConfig.get_config_dict(model)[0]
    except (OSError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise values.UsageError(
            f"{option} {model}: its config.json cannot be read: {problem}"
        ) from None
    return config
