"""Checks of vLLM's KV connectors for a diffusion model (``--kv-transfer-config``).

A connector carries blocks of the KV cache to another server, or to a store. Connectors that cannot
work are refused by name before anything is loaded; docs/operate/disaggregation.md lists what is known about
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_diffusion.startup.options import refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# Connectors that need a package which vLLM does not install, with a module of the package.
PACKAGES = {
    **dict.fromkeys(("NixlConnector", "NixlPullConnector", "NixlPushConnector"), "nixl"),
    **dict.fromkeys(("LMCacheConnectorV1", "LMCacheMPConnector"), "lmcache"),
    **dict.fromkeys(("MooncakeConnector", "MooncakeStoreConnector"), "mooncake"),
    "MoRIIOConnector": "mori",
    "FlexKVConnectorV1": "flexkv",
    # Without it vLLM would run a mock.
    "HF3FSKVConnector": "hf3fs_fuse",
}
# Connectors that copy from a GPU's memory.
GPU_ONLY = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
# Connectors that cannot serve a diffusion model, with the reason and the remedy.
REFUSED = {
    "ExampleConnector": (
        "is vLLM's example, which ends the engine at a prompt that begins as one it keeps; set "
        "kv_connector to NixlConnector"
    ),
    "ExampleHiddenStatesConnector": (
        "stores hidden states of speculative decoding, which a diffusion model does not do; leave it "
        "out"
    ),
    "DecodeBenchConnector": (
        "fills the cache with made-up keys and values, from which no canvas converges; leave it out"
    ),
    "HiSparseConnector": "is for sparse attention, of other models; leave it out",
}
_SEVERAL = "MultiConnector"
KNOWN = PACKAGES.keys() | GPU_ONLY | REFUSED.keys() | {_SEVERAL}


def check_kv_connectors(vllm_config: VllmConfig) -> None:
    """Refuse a connector that cannot work with diffusion models or on this machine.

    Raises:
        ValueError: Naming the connector and the remedy.
    """
    transfer = vllm_config.kv_transfer_config
    loads = transfer is not None and transfer.is_kv_consumer
    multimodal = vllm_config.model_config.multimodal_config
    # vLLM sets --enable-mm-embeds by itself then, after our check of options.
    if (
        (loads or vllm_config.cache_config.kv_offloading_size is not None)
        and multimodal is not None
        and not multimodal.language_model_only
    ):
        _refuse(
            "a server that loads keys and values (with --kv-offloading-size too) lets clients send "
            "embeddings in place of images, which DiffusionGemma does not take; add "
            "--language-model-only, or leave it out"
        )
    if transfer is None or transfer.kv_connector is None:
        return
    _check(vars(transfer), vllm_config.parallel_config.pipeline_parallel_size)


def _check(settings: Mapping[str, Any], num_stages: int) -> None:
    """Check one connector, and those that it consists of."""
    from vllm.platforms import current_platform

    device = settings.get("kv_buffer_device", "cpu")
    if current_platform.is_cpu() and device != "cpu":
        _refuse(f'kv_buffer_device "{device}" needs a GPU; leave it out')
    if settings.get("kv_connector_module_path"):
        # A connector outside vLLM is not checked.
        return
    name, extra = settings.get("kv_connector"), settings.get("kv_connector_extra_config") or {}
    if name not in KNOWN:
        _refuse(f"{name} is not known to vLLM 0.33; set kv_connector to NixlConnector")
    if name in REFUSED:
        _refuse(f"{name} {REFUSED[name]}")
    # A specification outside vLLM copies by itself.
    if name in GPU_ONLY and current_platform.is_cpu() and not extra.get("spec_module_path"):
        _refuse(f"{name} needs a GPU, whose cache it moves to the CPU's memory; leave it out")
    module = PACKAGES.get(name)
    # vLLM's NIXL supports stages with some caches and roles only, none of which was tried.
    if module == "nixl" and num_stages > 1:
        _refuse(
            f"{name} is not served with stages; leave --pipeline-parallel-size out, and divide the model "
            "with --tensor-parallel-size"
        )
    if module is not None and find_spec(module) is None:
        _refuse(f"{name} needs the package {module}, which is not installed; install it")
    if name == _SEVERAL:
        children = extra.get("connectors")
        if not isinstance(children, list) or not all(isinstance(c, Mapping) for c in children):
            _refuse('MultiConnector needs its "connectors"; list them in kv_connector_extra_config')
        for child in children:
            _check(child, num_stages)


def _refuse(sentence: str) -> NoReturn:
    raise ValueError(refusal("--kv-transfer-config", sentence=sentence))
