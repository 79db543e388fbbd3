"""Ways to draft for a target, each as the options of a server, and the files that a way needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_diffusion.cli import values
from vllm_diffusion.drafting.commands.draft_runs import Contender

DFLASH, ADAPTIVE, NGRAM = "dflash", "adaptive", "ngram"
DRAFT_MODEL, EAGLE3 = "draft_model", "eagle3"
# vLLM's methods; those of models with heads for it (MTP) have names of their own too, in _mtp.
METHODS = (
    *(DFLASH, ADAPTIVE, NGRAM, EAGLE3, DRAFT_MODEL),
    *("dspark", "eagle", "mtp", "ngram_gpu", "suffix"),
)
# Those whose tokens come from the text so far, from the target's own heads, or from the target.
_WITHOUT_A_DRAFT = (NGRAM, DRAFT_MODEL, "mtp", "ngram_gpu", "suffix")
# What vLLM looks for in the text so far: its own default is five tokens, no less.
_NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
# Fields of the target that the draft shares, needed ones first.
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
_SHARED = (
    *("num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling"),
    *("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
)


def draft_method(value: str) -> str:
    """Read a method of vLLM's to draft."""
    if value not in METHODS and not value.endswith("_mtp"):
        raise values.Refusal(f"{value!r} must be one of {', '.join(METHODS)}, or a name in _mtp.")
    return value


def drafts_by_method(given: Sequence[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Group the models of ``--draft`` by their method."""
    found: dict[str, tuple[str, ...]] = {}
    for method, model in given:
        name = method or DFLASH
        found[name] = (*found.get(name, ()), model)
    return found


def default_methods(drafts: Mapping[str, Sequence[str]], *, adds_models: bool) -> list[str]:
    """Return the methods that have what they need.

    Args:
        drafts: Models by method.
        adds_models: Whether EAGLE-3 and ``draft_model`` take part without a model of theirs, with one
            that stands for it.
    """
    methods = [DFLASH, ADAPTIVE] if DFLASH in drafts else []
    methods += [NGRAM, DRAFT_MODEL, EAGLE3] if adds_models else [NGRAM]
    return [*methods, *(each for each in drafts if each not in methods)]


def contenders(
    target: Path,
    drafts: Mapping[str, tuple[str, ...]],
    *,
    methods: Sequence[str],
    steps: Sequence[int],
    num_drafts: int,
    scratch: Path,
) -> list[Contender]:
    """Return the server without a draft, and one for every way to draft.

    Args:
        target: Model of all of them.
        drafts: Models by method.
        methods: Ways to draft.
        steps: Passes of DFlash drafts.
        num_drafts: Tokens of those without a block.
        scratch: Folder where a draft may be written.

    Raises:
        UsageError: If a method has no draft, or a draft cannot be read.
    """

    def given(method: str) -> tuple[str, ...]:
        return drafts.get(DFLASH if method == ADAPTIVE else method, ())

    for method in methods:
        is_made = method == EAGLE3 and (target / "config.json").is_file()
        if not (given(method) or is_made or method in _WITHOUT_A_DRAFT):
            needed = "MODEL" if method in (DFLASH, ADAPTIVE) else f"{method}=MODEL"
            raise values.UsageError(f"--method {method} needs a draft: give --draft {needed}.")
    found = [Contender("no draft")]
    for method in methods:
        models, note = given(method), ""
        if not models and method == DRAFT_MODEL:
            models, note = (str(target),), "the target itself, for want of a smaller model"
        elif not models and method == EAGLE3:
            config = untrained_eagle3(target, scratch / EAGLE3, num_drafts)
            note = "untrained: random weights, only to see what a draft of this kind costs"
            found.append(Contender(method, _options(config), note))
            continue
        for model in models or ("",):
            name = method if len(models) < 2 else f"{method} {Path(model).name}"
            if method == DFLASH:
                for passes in steps:
                    each = name
                    if len(steps) > 1:
                        each += f", {passes} pass{'es' * (passes > 1)}"
                    # One pass is what stock has.
                    settings = {"steps": passes} if passes > 1 else {}
                    found.append(Contender(each, dflash_options(model, settings), passes=passes))
            elif method == ADAPTIVE:
                found.append(Contender(name, dflash_options(model, {"adaptive": True})))
            else:
                config = {"method": method, "num_speculative_tokens": num_drafts}
                config |= {"model": model} if model else {}
                config |= _NGRAM if method == NGRAM else {}
                found.append(Contender(name, _options(config), note))
    return found


def dflash_options(model: str, settings: dict[str, Any] | None = None) -> tuple[str, ...]:
    """Return options of ``vllm serve`` for a DFlash draft and the whole of its blocks.

    Args:
        model: The draft.
        settings: Of ``additional_config["drafting"]``.

    Raises:
        UsageError: As :func:`block_size_of`.
    """
    speculative = {"method": DFLASH, "num_speculative_tokens": block_size_of(model) - 1}
    return _options(speculative | {"model": model}, settings)


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
    file = Path(model) / "config.json"
    try:
        if file.is_file():
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        else:
            from transformers import PreTrainedConfig

            config, _ = PreTrainedConfig.get_config_dict(model)
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise values.UsageError(
            f"--draft {model}: its config.json cannot be read: {said}"
        ) from None
    return config


def block_size_of(model: str) -> int:
    """Read how many tokens a block of a DFlash draft has, from its ``config.json``.

    Raises:
        UsageError: If it does not say, or cannot be read.
    """
    config = draft_config(model)
    # Some publishers have it among the fields of DFlash.
    block_size = config.get("block_size") or config.get("dflash_config", {}).get("block_size")
    if not isinstance(block_size, int) or block_size < 2:
        raise values.UsageError(
            f"--draft {model}: block_size={block_size!r} in its config.json is not that of a DFlash draft; "
            "a draft of another method is given as METHOD=MODEL."
        )
    return block_size


def untrained_eagle3(target: Path, folder: Path, num_drafts: int) -> dict[str, Any]:
    """Write the configuration of an EAGLE-3 draft of one layer that reads three layers of its target.

    Its weights are random, and so are its proposals: it shows what a draft of this kind costs.
    vLLM makes its weights up (``load_format: dummy``); embedding and head are the target's.

    Args:
        target: A checkpoint of Qwen3 or Llama.
        folder: Folder to write to, made if absent.
        num_drafts: Tokens of a proposal.

    Returns:
        The ``--speculative-config`` that serves it.

    Raises:
        ValueError: If the target is not a language model with attention heads and at least four layers.
    """
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    missing = [name for name in (*_NEEDED, "num_hidden_layers") if name not in config]
    if missing or config["num_hidden_layers"] < 4:
        lacks = f"no {missing[0]} in its config.json" if missing else "fewer than four layers"
        raise ValueError(f"{target} has {lacks}; name an EAGLE-3 draft.")
    num_layers = config["num_hidden_layers"]
    ours = {name: config[name] for name in (*_NEEDED, *_SHARED) if name in config} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "head_dim": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        "draft_vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
        # An early one, one in the middle, a late one, counted from 1.
        "eagle_aux_hidden_state_layer_ids": [1, num_layers // 2, num_layers - 1],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
    return {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": num_drafts,
        "draft_load_config": {"load_format": "dummy"},
    }
