"""Checks and choices for a draft when it is configured, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_diffusion.drafting.draft_fields import (
    block_size_of,
    check_fields,
    dflash_fields,
    mask_token_of,
    name_as_vllm,
    reads_target_states,
    restore_causality,
    stock_mask_token,
    stock_target_layers,
)
from vllm_diffusion.drafting.draft_settings import OPTION, DraftSettings, draft_settings
from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.weights.regular_files import why_not_folder

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

logger = init_logger(f"vllm.{__name__}")
SCHEDULER = "vllm_diffusion.drafting.scheduler.draft_scheduler"
ARCHITECTURE = "DFlashMaskedDraftModel"
# Our class serves this architecture too if the operator sets anything about the draft.
STOCK_ARCHITECTURE = "DFlashDraftModel"


def install() -> None:
    """Check drafts where vLLM checks their target. This is safe to call twice.

    vLLM looks up the served model in a table of architectures, but not its draft.
    """
    _looking_at_drafts.install()


@replaces_call(
    "vllm.config.vllm:VllmConfig.try_verify_and_update_config",
    reason="Looks at the draft: vLLM's table of architectures knows targets alone.",
    until="MODELS_CONFIG_MAP is read for the draft's architecture too.",
)
def _looking_at_drafts(stock: Callable[[VllmConfig], None], self: VllmConfig) -> None:
    # A configuration is copied for each part of the engine, and is looked at once.
    is_new = not getattr(self.model_config, "config_updated", False)
    stock(self)
    if is_new:
        check_draft(self)


def check_draft(vllm_config: VllmConfig) -> None:
    """Refuse a draft that does not fit; choose our class for it if the operator sets anything about
    it.

    Raises:
        ValueError: Naming the setting or the field, what it is, and the remedy.
    """
    settings, additional = draft_settings(vllm_config), vllm_config.additional_config
    section = additional.get("drafting") if isinstance(additional, Mapping) else None
    # These two are for any target and any draft; the others need a draft that this package serves.
    is_set = section is not None and not (section and {"adaptive", "record"}.issuperset(section))
    spec = vllm_config.speculative_config
    if settings.adaptive or settings.record is not None:
        _choose_scheduler(vllm_config, settings)
    is_dflash = spec is not None and spec.method == "dflash"
    if is_dflash:
        restore_causality(spec.draft_model_config.hf_config)
    if is_dflash and (nemo := name_as_vllm(spec.draft_model_config.hf_config)) is not None:
        spec.update_arch_()
        logger.info(
            "The draft %s is a %s of NeMo AutoModel, served as %s.",
            spec.model,
            nemo,
            spec.draft_model_config.architectures[0],
        )
    architectures = list(spec.draft_model_config.architectures) if is_dflash else []
    is_stock = STOCK_ARCHITECTURE in architectures
    is_ours = ARCHITECTURE in architectures or (is_set and is_stock)
    if is_set and not is_ours:
        served = architectures[0] if architectures else "none"
        raise ValueError(
            f"{OPTION} sets a draft of architecture {ARCHITECTURE} or {STOCK_ARCHITECTURE}; the "
            f"draft of --speculative-config is {served}: leave drafting out, or give such a draft "
            'with "method": "dflash".'
        )
    if not is_ours and not is_stock:
        if "DFlash2DraftModel" in architectures:
            where = f"config.json of the draft {spec.model}"
            _warn_of_block(spec.draft_model_config.hf_config, where, spec.num_speculative_tokens)
        return
    if os.path.isdir(spec.model) and (problem := why_not_folder(spec.model)):
        raise ValueError(f"The draft {spec.model} {problem}; copy or train it again.")
    config = spec.draft_model_config.hf_config
    check_pair(config, spec.model, spec, by_stock=not is_ours, window=settings.window)
    if not is_ours:
        return
    settings.unmask_counts(spec.num_speculative_tokens)
    if settings.window is not None:
        set_window(config, settings.window)
    if ARCHITECTURE not in architectures:
        config.architectures = [ARCHITECTURE]
        spec.update_arch_()


def _choose_scheduler(vllm_config: VllmConfig, settings: DraftSettings) -> None:
    """Choose our scheduler for the settings that vLLM's does not support.

    Raises:
        ValueError: If another scheduler is set, or a setting is not possible.
    """
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls == SCHEDULER:
        # The configuration of a draft that vLLM loads as a model of its own.
        return
    name = "adaptive=true" if settings.adaptive else "record"
    if vllm_config.diffusion_config is not None:
        raise ValueError(
            f"{OPTION}: {name} is for autoregressive targets, and a diffusion model takes no draft; leave it out."
        )
    if scheduler.scheduler_cls is not None:
        raise ValueError(
            f"{OPTION}: {name} needs its own scheduler; leave out --scheduler-cls or {name}."
        )
    if settings.adaptive and not _adapt(vllm_config):
        section = dict(vllm_config.additional_config["drafting"]) | {"adaptive": False}
        vllm_config.additional_config = {**vllm_config.additional_config, "drafting": section}
        if settings.record is None:
            return
    if settings.record is not None:
        try:
            # A bad folder is refused now; the engine locks the folder later.
            os.close(settings.record.ring().lock())
        except ValueError as error:
            raise ValueError(f"{OPTION}: record.{error}") from None
    scheduler.scheduler_cls = SCHEDULER


def _adapt(vllm_config: VllmConfig) -> bool:
    """Set the numbers of drafts that vLLM captures CUDA graphs for.

    Returns:
        True if the scheduler can choose among them; false with data parallelism.

    Raises:
        ValueError: If there is no draft.
    """
    spec, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    if spec is None:
        raise ValueError(
            f"{OPTION}: adaptive=true needs a draft; give one with --speculative-config, or leave "
            "adaptive out."
        )
    if vllm_config.parallel_config.data_parallel_size > 1:
        logger.warning(
            "%s: adaptive=true is off: data-parallel engines must all draft the same number of tokens.",
            OPTION,
        )
        return False
    longest = spec.num_speculative_tokens
    if not spec.num_speculative_tokens_per_batch_size:
        # vLLM captures graphs for the numbers of this table; the scheduler chooses one per batch.
        levels = [longest >> halvings for halvings in range(longest.bit_length())]
        levels = [*levels[: max(scheduler.max_num_seqs - 1, 1)], 0]
        spec.num_speculative_tokens_per_batch_size = [
            (size, size, level) for size, level in enumerate(levels, start=1)
        ]
    return True


def _resolve_mask_token(draft: Any, model: str | Path, target: ModelConfig) -> None:
    """Set ``mask_token_id`` of a draft whose ``config.json`` has the mask token as text alone.

    Args:
        draft: Configuration of the draft, changed in place.
        model: Name or path of the draft.
        target: Configuration of the model that verifies, whose tokenizer is read.

    Raises:
        ValueError: If the text is not one token of the tokenizer.
    """
    of_draft = dflash_fields(draft)
    text = of_draft.get("mask_token", getattr(draft, "mask_token", None))
    if text is None or mask_token_of(draft) is not None:
        return
    ids: list[int] = []
    if isinstance(text, str):
        from vllm.tokenizers.registry import cached_tokenizer_from_config

        # None for a server that is set to have none.
        tokenizer = cached_tokenizer_from_config(target)
        ids = tokenizer.encode(text, add_special_tokens=False) if tokenizer else []
    if len(ids) != 1:
        raise ValueError(
            f"config.json of the draft {model}: dflash_config.mask_token={text!r} must be one token of the "
            f"target's tokenizer, but is {len(ids)} ({ids}); set dflash_config.mask_token_id to the id of the "
            "token that the draft was trained with."
        )
    draft.dflash_config = {**of_draft, "mask_token_id": ids[0]}


def check_pair(
    draft: Any,
    model: str | Path,
    spec: SpeculativeConfig,
    *,
    by_stock: bool = False,
    window: int | None = None,
) -> None:
    """Check that the configurations of draft and target describe a pair; warn of a block that is
    too long.

    Args:
        draft: Configuration of the draft; its ``mask_token_id`` is set if it has only the token's
            text.
        model: Name or path of the draft.
        spec: Configuration of the drafting server, with the target.
        by_stock: True if vLLM's own class serves the draft, as in :func:`check_fit`.
        window: The setting ``window``.

    Raises:
        ValueError: Naming the field, what it is, and the remedy.
    """
    target, num_drafts = spec.target_model_config, spec.num_speculative_tokens
    where = f"config.json of the draft {model}"
    check_fields(draft, where, window)
    _resolve_mask_token(draft, model, target)
    check_fit(
        draft,
        where,
        vocab_size=target.get_vocab_size(),
        hidden_size=target.get_hidden_size(),
        num_layers=target.get_total_num_hidden_layers(),
        by_stock=by_stock,
    )
    _warn_of_block(draft, where, num_drafts)


def _warn_of_block(draft: Any, where: str, num_drafts: int) -> None:
    """Warn of more tokens than a block has."""
    block_size = block_size_of(draft)
    if block_size is not None and num_drafts >= block_size:
        logger.warning(
            "--speculative-config: num_speculative_tokens=%d is more than the draft was trained for: a block of %d "
            "(block_size in %s) is an anchor and %d tokens. Few of the others will be accepted; set it to %d.",
            *(num_drafts, block_size, where, block_size - 1, block_size - 1),
        )


def check_fit(
    draft: Any,
    where: str,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    by_stock: bool = False,
) -> None:
    """Check that a draft and a target are a pair.

    Args:
        draft: Content of the draft's ``config.json``, as attributes.
        where: Name of that file in errors.
        vocab_size: Vocabulary size of the target.
        hidden_size: Hidden size of the target.
        num_layers: Number of layers of the target.
        by_stock: True if vLLM's own class serves the draft. It supports drafts that propose from a
            part of the vocabulary, that are narrower or wider than their target, that read its last
            layer, or that name layers and mask token in other fields. What it would fail at, or
            misread without an error, is refused.

    Raises:
        ValueError: Naming the field, what it is, and the remedy.
    """
    sizes = {"vocab_size": vocab_size, "target_hidden_size": hidden_size}
    if not by_stock:
        sizes |= {"draft_vocab_size": vocab_size, "num_target_layers": num_layers}
    if not by_stock or getattr(draft, "target_hidden_size", None) is None:
        sizes["hidden_size"] = hidden_size
    for name, size in sizes.items():
        value = getattr(draft, name, None)
        if value not in (None, size):
            raise ValueError(
                f"{where}: {name}={value!r} is not the target's {size}, whose hidden states, embedding and "
                "output head the draft uses; give a draft that was trained for this target."
            )
    name, layers, first = "dflash_config.target_layer_ids", None, 0
    if by_stock:
        name, layers, first = stock_target_layers(draft)
    else:
        layers = dflash_fields(draft).get("target_layer_ids")
    # Only vLLM gives the last layer's output before the target's last norm.
    num_readable = num_layers if by_stock else num_layers - 1
    if (
        not isinstance(layers, list | tuple)
        or not layers
        or not all(_is_within(layer, first + num_readable) for layer in layers)
    ):
        raise ValueError(
            f"{where}: {name}={layers!r} must list layers of the target, "
            f"0 to {first + num_readable - 1}; give a draft that was trained for this target."
        )
    if not reads_target_states(draft) and len(layers) != 1:
        raise ValueError(
            f"{where}: use_aux_hidden_state=false, but {name}={layers!r} lists more than one layer, "
            "which only a draft with it can combine; set use_aux_hidden_state to true, or give another draft."
        )
    name, mask = "dflash_config.mask_token_id", mask_token_of(draft)
    if by_stock:
        name, mask = stock_mask_token(draft)
    if not _is_within(mask, vocab_size):
        raise ValueError(
            f"{where}: {name}={mask!r} must be a token of the vocabulary, 0 to "
            f"{vocab_size - 1}; set it to the token that the draft was trained with."
        )


def _is_within(number: object, bound: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < bound


def set_window(config: Any, window: int) -> None:
    """Set the window of every layer to ``window`` tokens back; causal layers stay causal."""
    layer_types = set(getattr(config, "layer_types", None) or [])
    if len(layer_types) > 1:
        raise ValueError(
            f"{OPTION}: window={window} cannot be set for a draft whose layer_types are mixed "
            f"({', '.join(sorted(layer_types))}): its windows were trained; leave window out."
        )
    config.dflash_config = {**dflash_fields(config), "use_swa": True, "swa_window_size": window}
