"""Fields of a draft's ``config.json`` that vLLM reads while it loads or runs a draft, and their
types.

vLLM reads them without a check, in the worker: a value of another type ends the engine there, some
at the first request, or is read as true. Shapes of layers are not here: files that do not have them
are not loaded.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(ge=1)]
_FLAG = (bool | Literal[0, 1], "true or false")
_COUNT = (_Count, "an integer of at least 1")
_NUMBER = (float, "a number")
# Type of a field's value, and the value in words. Null is a field that is left out.
_TOP: dict[str, tuple[Any, str]] = {
    "draft_vocab_size": _COUNT,
    "has_own_lm_head": _FLAG,
    "add_swa_attention_sink_bias": _FLAG,
    "is_causal": _FLAG,
    # A kernel takes it, which converts nothing.
    "is_neox_style": (bool, "true or false"),
    "logit_scale": _NUMBER,
    "use_aux_hidden_state": _FLAG,
}
_NESTED: dict[str, tuple[Any, str]] = {
    "attention_sink_bias": _FLAG,
    "attention_value_scale": _NUMBER,
    "causal": _FLAG,
    "sample_from_anchor": (
        Literal[False],
        "false: a draft that predicts at its anchor is not DFlash",
    ),
    "swa_window_size": _COUNT,
    "use_aux_hidden_state": _TOP["use_aux_hidden_state"],
    "use_swa": _FLAG,
    "projector_type": (
        None,
        "left out: a draft with a head that corrects its tokens, such as Domino's, is not served",
    ),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Places of the target's layers, in the order in which vLLM looks: section, field, and the number of
# the target's first layer as the field counts.
_LAYER_FIELDS: tuple[tuple[str, str, int], ...] = (
    ("", "eagle_aux_hidden_state_layer_ids", 1),
    ("dflash_config", "target_layer_ids", 0),
    ("", "dspark_target_layer_ids", 0),
    ("", "target_layer_ids", 0),
    ("dflash_config", "layer_ids", 1),
    ("eagle_config", "layer_ids", 1),
)
# Other names of the mask token, in the order in which vLLM looks.
_MASK_FIELDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Architectures that NeMo AutoModel saves, by vLLM's names for them and the modules of vLLM that
# serve them. vLLM puts "DFlash" before an architecture that does not begin with it.
NEMO_ARCHITECTURES = {
    "Qwen3DFlashDraftModel": ("DFlashDraftModel", "qwen3_dflash:DFlashQwen3ForCausalLM"),
    "Qwen3DFlash2DraftModel": ("DFlash2DraftModel", "qwen3_dflash2:DFlash2Qwen3ForCausalLM"),
}


def name_as_vllm(draft: Any) -> str | None:
    """Give a draft that NeMo saved the architecture and the causality by which vLLM serves it.

    NeMo writes ``is_causal`` for all of its drafts, and ``dflash_config.causal`` over it for causal
    ones (JetSpec); vLLM takes the first.

    Args:
        draft: Content of the draft's ``config.json``, as attributes, changed in place.

    Returns:
        The architecture that NeMo saved; ``None`` for other drafts.
    """
    for nemo, (ours, _) in NEMO_ARCHITECTURES.items():
        if {nemo, f"DFlash{nemo}"}.intersection(getattr(draft, "architectures", None) or ()):
            draft.architectures = [ours]
            fields = getattr(draft, "dflash_config", None)
            if isinstance(fields, Mapping) and fields.get("causal") is not None:
                draft.is_causal = fields["causal"]
            return nemo
    return None


def restore_causality(draft: Any) -> None:
    """Leave it to each layer's type whether a draft that ``speculators`` saved is causal.

    Its trainer hides the positions ahead of a row in sliding layers only, unless
    ``sliding_window_non_causal`` is set. vLLM reads that field for all layers, so that full
    attention would be causal too (until vllm-project/vllm#56692 is merged).

    Args:
        draft: Content of the draft's ``config.json``, as attributes, changed in place.
    """
    fields = dflash_fields(draft)
    if getattr(draft, "model_type", None) == "speculators" and fields.get("causal"):
        draft.dflash_config = {name: fields[name] for name in fields if name != "causal"}


def dflash_fields(draft: Any) -> Mapping[str, Any]:
    """Return the fields of DFlash in a draft's configuration."""
    return getattr(draft, "dflash_config", None) or {}


def mask_token_of(draft: Any) -> Any:
    """Return the id of the mask token in a draft's configuration; ``None`` if it has none."""
    return dflash_fields(draft).get("mask_token_id", getattr(draft, "mask_token_id", None))


def block_size_of(draft: Any) -> int | None:
    """Return the length of a draft's blocks, anchor included; ``None`` if it is not there.

    Trainers write it at two places, and the shorter one counts.
    """
    fields = getattr(draft, "dflash_config", None)
    nested = fields.get("block_size") if isinstance(fields, Mapping) else None
    lengths = [n for n in (getattr(draft, "block_size", None), nested) if isinstance(n, int) and n]
    return min(lengths, default=None)


def reads_target_states(draft: Any) -> bool:
    """Return true if the draft has the layer that combines hidden states of several of the target's
    layers.
    """
    default = getattr(draft, "use_aux_hidden_state", True)
    return bool(dflash_fields(draft).get("use_aux_hidden_state", default))


def stock_mask_token(draft: Any) -> tuple[str, Any]:
    """Return the field that vLLM reads the mask token from, and its value."""
    if "mask_token_id" in dflash_fields(draft):
        return "dflash_config.mask_token_id", dflash_fields(draft)["mask_token_id"]
    for name in _MASK_FIELDS:
        if getattr(draft, name, None) is not None:
            return name, getattr(draft, name)
    return "dflash_config.mask_token_id", None


def stock_target_layers(draft: Any) -> tuple[str, Any, int]:
    """Return the field that vLLM reads the target's layers from.

    Returns:
        Name, value, and the number of the target's first layer as the field counts; where that is
        1, 0 is the embedding. Without a field, vLLM reads layers of its own choice, which no draft
        of DFlash was trained with.
    """
    for section, name, first in _LAYER_FIELDS:
        holder = getattr(draft, section, None) if section else draft
        layers = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
        if layers:
            return (f"{section}.{name}" if section else name), layers, first
    return "dflash_config.target_layer_ids", dflash_fields(draft).get("target_layer_ids"), 0


def check_fields(draft: Any, where: str, window: int | None = None) -> None:
    """Refuse fields of another type than vLLM takes them for.

    Args:
        draft: Content of the draft's ``config.json``, as attributes.
        where: Name of that file in errors.
        window: Window that is set for every layer, in place of the file's.

    Raises:
        ValueError: Naming the field, what it is, and what it may be.
    """
    for section in ("dflash_config", "eagle_config"):
        content = getattr(draft, section, None)
        if content is not None and not isinstance(content, Mapping):
            raise _misfit(where, section, content, "an object")
    nested = dflash_fields(draft)
    fields = [(name, getattr(draft, name, None), kind) for name, kind in _TOP.items()]
    fields += [(f"dflash_config.{name}", nested.get(name), kind) for name, kind in _NESTED.items()]
    for name, value, (kind, what) in fields:
        if value is None:
            continue
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise _misfit(where, name, value, what) from None
    if window is None:
        _check_windows(draft, where)


def _check_windows(draft: Any, where: str) -> None:
    """Check that there is a kind of attention for each layer, and a window where it slides."""
    kinds = getattr(draft, "layer_types", None)
    num_layers = getattr(draft, "num_hidden_layers", None)
    if kinds is not None and (
        not isinstance(kinds, Sequence)
        or not all(kind in _LAYER_TYPES for kind in kinds)
        or (num_layers is not None and len(kinds) < num_layers)
    ):
        what = f"a list of {' or '.join(_LAYER_TYPES)}, one for each of {num_layers} layers"
        raise _misfit(where, "layer_types", kinds, what)
    nested = dflash_fields(draft)
    if not nested.get("use_swa") and _LAYER_TYPES[1] not in (kinds or ()):
        return
    name, window = "dflash_config.swa_window_size", nested.get("swa_window_size")
    if "swa_window_size" not in nested:
        name, window = "sliding_window", getattr(draft, "sliding_window", None)
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        what = "the number of tokens that its sliding layers see back, an integer of at least 1"
        if name == "sliding_window" and getattr(draft, "use_sliding_window", None) is False:
            what += ", which transformers reads only beside use_sliding_window=true"
        raise _misfit(where, name, window, what)


def _misfit(where: str, name: str, value: object, what: str) -> ValueError:
    return ValueError(
        f"{where}: {name}={value!r} must be {what}; correct it, or give another draft."
    )
