"""Names in the quantisation of a draft: those of its files, as the modules that vLLM makes of them.

A draft's files name its modules ``fc`` and ``layers.0.mlp.down_proj``. vLLM makes ``model.fc`` of
the one, and counts layers from the target's last: ``model.layers.36.mlp.down_proj``. It compares
the entries of a list of what is not quantised with its own names, so that a module of the list
would be read as quantised: the draft loads, and nothing that it proposes is accepted.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from vllm_diffusion.hooks.replacement import replaces_call

# Linear modules of a layer.
_OF_LAYER = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
# Modules that vLLM fuses, by name.
_FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
# Attributes of vLLM's configurations that list modules which are not quantised.
_LISTS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")


def install() -> None:
    """Rename the modules in a draft's quantisation before its layers are made. Safe to call
    twice.
    """
    _naming_as_vllm.install()


@replaces_call(
    "vllm.model_executor.models.qwen3_dflash:map_draft_quant_config",
    reason="Stock maps names of modelopt's configurations alone; with others `fc` is read as quantised.",
    until="map_draft_quant_config maps the names of every method of quantisation.",
)
def _naming_as_vllm(
    stock: Any,
    quant_config: Any,
    weight_mapper: Any,
    prefix: str,
    start_layer_id: int,
    num_hidden_layers: int,
) -> None:
    stock(quant_config, weight_mapper, prefix, start_layer_id, num_hidden_layers)
    from vllm.model_executor.layers.quantization.modelopt import ModelOptQuantConfigBase

    if quant_config is None or isinstance(quant_config, ModelOptQuantConfigBase):
        return
    rename_modules(
        quant_config,
        prefix,
        start_layer_id,
        num_hidden_layers,
        weight_mapper.get_rename_mapper().map_name,
    )


def rename_modules(
    quant_config: Any,
    prefix: str,
    start_layer_id: int,
    num_layers: int,
    alias: Callable[[str], str | None] = lambda name: name,
) -> None:
    """Put vLLM's names in place of the files', in a draft's configuration of quantisation.

    An entry that no module of the files matches stays as it is, among them vLLM's own names.

    Args:
        quant_config: vLLM's configuration of any method but modelopt's; changed in place.
        prefix: Prefix of vLLM's names.
        start_layer_id: Number of the draft's first layer in vLLM's names.
        num_layers: Number of the draft's layers.
        alias: Maps other names of the files to the usual ones.
    """
    root = f"{prefix}." if prefix else ""
    names = {"fc": f"{root}fc"}
    for layer in range(num_layers):
        for module in _OF_LAYER:
            names[f"layers.{layer}.{module}"] = f"{root}layers.{start_layer_id + layer}.{module}"
    for attribute in _LISTS:
        entries = getattr(quant_config, attribute, None)
        if isinstance(entries, list):
            setattr(quant_config, attribute, list(_renamed(entries, names, alias)))
    schemes = getattr(quant_config, "target_scheme_map", None)
    if isinstance(schemes, dict):
        quant_config.target_scheme_map = {
            name: scheme
            for entry, scheme in schemes.items()
            for name in _renamed([entry], names, alias)
        }
    # vLLM sets it for the target's configuration alone.
    quant_config.packed_modules_mapping = {**_FUSED, **quant_config.packed_modules_mapping}


def _renamed(
    entries: Iterable[Any], names: dict[str, str], alias: Callable[[str], str | None]
) -> Iterable[Any]:
    """Yield vLLM's names of the modules that each entry matches, and the entry itself where it
    still means them.
    """
    for entry in entries:
        matched = [ours for name, ours in names.items() if _matches(entry, name, alias)]
        yield from matched
        # A pattern without a layer's number means the same of vLLM's names, and of modules not
        # listed here.
        if not matched or (entry.startswith("re:") and not re.search(r"\d", entry)):
            yield entry


def _matches(entry: Any, name: str, alias: Callable[[str], str | None]) -> bool:
    """Return true if an entry is a module's name, the name of what contains it, or a pattern of
    it.
    """
    if not isinstance(entry, str):
        return False
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    plain = alias(entry) or entry
    return name == plain or name.startswith(f"{plain}.")
